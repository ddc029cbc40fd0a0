"""Train a tiny Qwen2 with DeepSpeed, in full and as an adapter; torchrun runs this file.

Writes `<root>/<case>/` as Trainer does, with `global_step1/`, config.json and adapter_config.json,
and the base to `<root>/base/`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tasks.process.exit_process import end_process
from tasks.training.engine.deepspeed_engine import Ranks
from tests.weights.making import small_config

CASES = {"full": (3, False), "lora": (2, True)}
"""By name: ZeRO stage, and whether an adapter is trained."""


def model_of(*, lora: bool) -> Any:
    """Return the model before training."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(small_config("qwen"), dtype=torch.bfloat16)
    if not lora:
        return model
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def train(stage: int, *, lora: bool, world_size: int) -> Any:
    """Train one step, and return DeepSpeed's engine."""
    import deepspeed

    model = model_of(lora=lora)
    config = {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 2**31 - 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=wanted, config=config)
    ids = torch.arange(9).reshape(1, 9) + engine.global_rank
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    return engine


def main() -> None:
    """Save every case into the folder named on the command line."""
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    ranks = Ranks()
    if ranks.first:
        model_of(lora=False).save_pretrained(root / "base")
    for name, (stage, lora) in CASES.items():
        engine = train(stage, lora=lora, world_size=ranks.world_size)
        engine.save_checkpoint(str(root / name), tag="global_step1")
        if ranks.first and lora:
            engine.module.peft_config["default"].save_pretrained(root / name)
        if ranks.first and not lora:
            engine.module.config.save_pretrained(root / name)
        engine.destroy()
        ranks.barrier()
    ranks.leave()
    end_process()


if __name__ == "__main__":
    main()
