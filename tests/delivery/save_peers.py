"""Save checkpoints with verl's and OpenRLHF's own code, whose trainers need CUDA, and old peft's.

Run in their environments (peers.sh):
verl: FSDPCheckpointManager writes a LoRA actor under FSDP2 on gloo.
OpenRLHF: Actor or get_llm_for_sequence_regression builds it, DeepspeedStrategy.save_model saves it.
Both record the live policy with plumbline_witness, as its README says for a loop of one's own.

    torchrun --nproc-per-node 2 save_peers.py verl BASE OUT
    python save_peers.py openrlhf BASE OUT reward|critic|actor
    python save_peers.py peft BASE OUT
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch


def save_verl(base: str, out: str) -> None:
    """Save one rank's shard of the actor, as `verl` leaves it at a training step."""
    import torch.distributed as dist
    from peft import LoraConfig, get_peft_model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    wrapped = get_peft_model(model, config)
    _move(wrapped)
    fully_shard(wrapped, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    contents = {"load_contents": ["model"], "save_contents": ["model"]}
    tokenizer = AutoTokenizer.from_pretrained(base)
    FSDPCheckpointManager(
        wrapped, processing_class=tokenizer, checkpoint_config=contents
    ).save_checkpoint(out, global_step=1)
    record(wrapped, tokenizer, out)
    dist.destroy_process_group()


def save_openrlhf(base: str, out: str, kind: str) -> None:
    """Save a LoRA adapter of a reward model, a critic or a policy."""
    from openrlhf.models import Actor, get_llm_for_sequence_regression
    from openrlhf.utils.deepspeed import deepspeed as engine
    from transformers import AutoTokenizer

    torch.manual_seed(0)
    options: dict[str, Any] = {
        "attn_implementation": "eager", "param_dtype": "bf16",
        "lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"],
    }  # fmt: skip
    if kind == "actor":
        model = Actor(base, **options)
    else:
        model = get_llm_for_sequence_regression(base, kind, **options, init_value_head=True)
    _move(model)
    engine.torch_dist_barrier_and_cuda_sync = lambda: None
    arguments = SimpleNamespace(
        ds=SimpleNamespace(param_dtype="bf16", zero_stage=2, tensor_parallel_size=1),
        train=SimpleNamespace(dynamic_batch_enable=False),
    )
    strategy = engine.DeepspeedStrategy(args=arguments)
    strategy.is_rank_0 = lambda: True
    tokenizer = AutoTokenizer.from_pretrained(base)
    strategy.save_model(model, tokenizer, out)
    if kind == "actor":
        record(model.model, tokenizer, out)


PEFT: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": "all-linear"},
    "rslora": {"target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"q_proj": 3}},
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "saved": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "norm"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"], "alpha_pattern": {"q_proj": 2}},
}


def save_peft(base: str, out: str) -> None:
    """Save one adapter of each kind, and this peft's own merge in float32 as `NAME/merged`."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    for name, settings in PEFT.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(base, torch_dtype=torch.float32)
        config = LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **settings)
        wrapped = get_peft_model(model, config)
        _move(wrapped)
        wrapped.save_pretrained(f"{out}/{name}")
        wrapped.merge_and_unload().save_pretrained(f"{out}/{name}/merged")


def record(model: Any, tokenizer: Any, out: str) -> None:
    """Record the live model, if the package is on the path."""
    try:
        from plumbline_witness import witness
    except ImportError:
        return
    witness(model, tokenizer, out)


def _move(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)


if __name__ == "__main__":
    {"verl": save_verl, "openrlhf": save_openrlhf, "peft": save_peft}[sys.argv[1]](*sys.argv[2:])
