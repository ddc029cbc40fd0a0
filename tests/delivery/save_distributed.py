"""Train a tiny model or adapter with FSDP2 on all ranks, and save it as a distributed checkpoint.

    python -m tests.delivery.save_distributed BASE OUT [lora] [accelerate]
    python -m tests.delivery.save_distributed BASE OUT witness

Writes `OUT/checkpoint` and, gathered by torch, what is in memory: `OUT/live.safetensors`; with
`witness` a record of the sharded model before any step.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SEEN = torch.arange(8)[None]


def take_step(model: Any) -> torch.optim.Optimizer:
    """Change everything that is trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    for _ in range(2):  # a B of zeros gives A no gradient in the first
        model(input_ids=SEEN, labels=SEEN).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def with_adapter(model: Any, folder: Path) -> Any:
    """Return the model with a LoRA adapter, whose configuration is written to `folder`."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    folder.mkdir(parents=True, exist_ok=True)
    if not dist.is_initialized() or dist.get_rank() == 0:
        model.peft_config["default"].save_pretrained(folder)
    return model


def main(base: Path, out: Path, *words: str) -> None:
    """Train on every rank, save, and gather."""
    from safetensors.torch import save_file
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tasks.witness.plumbline_witness import witness

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if "lora" in words:
        model = with_adapter(model, out / "checkpoint")
    for layer in (model.get_base_model() if "lora" in words else model).model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if "witness" in words:
        witness(model, AutoTokenizer.from_pretrained(base), str(out))
        dist.destroy_process_group()
        return
    optimizer = take_step(model)
    if "accelerate" in words:  # as Trainer does, which saves of a PEFT model the adapter alone
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.utils import save_fsdp_model

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type="SHARDED_STATE_DICT"
        )
        save_fsdp_model(
            plugin, Accelerator(cpu=True), model, str(out / "checkpoint"), adapter_only=True
        )
    else:
        state = {"model": get_model_state_dict(model), "optim": optimizer.state_dict()}
        checkpoint.save(state, checkpoint_id=out / "checkpoint")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    live = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        save_file({name: x.clone() for name, x in live.items()}, out / "live.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
