"""Train tiny models for two steps and save them in every way that DeepSpeed can; run in ranks.

Beside each checkpoint rank 0 writes config.json or adapter_config.json, as a trainer does, and
`<case>/expected.safetensors`: the result of DeepSpeed's own `zero_to_fp32`. If that fails, its
error is in `<case>/refused.txt`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tasks.process.torch_process import end_process
from tasks.training.engine.deepspeed_engine import Ranks
from tests.tiny import tiny

ROWS = 37
"""Rows of the embedding: odd, so that every stage has to pad."""


@dataclass(frozen=True)
class Case:
    """A model, saved once, or twice if it has frozen weights."""

    name: str
    stage: int
    lora: bool = False
    tied: bool = True
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("full-0", 0),
    Case("full-2", 2),
    Case("round-robin", 2, zero={"round_robin_gradients": True}),
    Case("full-3", 3, zero={"sub_group_size": 700}),
    Case("bf16-optimizer", 1, config={"data_types": {"grad_accum_dtype": "fp32"}}),
    Case("lora-1", 1, lora=True),
    Case("lora-2", 2, lora=True, tied=False),
    Case("lora-3", 3, lora=True),
)


def make_model(case: Case) -> nn.Module:
    """Make a Qwen2 with two persistent buffers, wrapped by peft for LoRA cases."""
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(7)
    sizes = {"vocab_size": ROWS, "hidden_size": 12, "intermediate_size": 20}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = tiny("Qwen2", **sizes, **heads, tie_word_embeddings=case.tied)
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.model.register_buffer("seen", torch.arange(5))
    model.model.register_buffer("mean", torch.linspace(-1, 1, 3).to(model.dtype))
    if case.lora:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    return model


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Split parameters into groups with and without weight decay, as is usual."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    plain = [p for _, p in named if p.ndim < 2]
    groups = [{"params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.1}]
    return groups + ([{"params": plain, "weight_decay": 0.0}] if plain else [])


def train(case: Case, world_size: int) -> Any:
    """Return DeepSpeed's engine after two steps."""
    import deepspeed

    model = make_model(case)
    config = {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 2**31 - 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": case.stage, **case.zero},
        **case.config,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameter_groups(model), config=config
    )
    generator = torch.Generator().manual_seed(engine.global_rank)
    for _ in range(2):
        ids = torch.randint(0, ROWS, (1, 9), generator=generator)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    return engine


def expect(folder: Path, *, exclude: bool) -> None:
    """Save DeepSpeed's own conversion of the checkpoint, or its error."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from safetensors.torch import save_file

    try:
        state = get_fp32_state_dict_from_zero_checkpoint(
            str(folder), exclude_frozen_parameters=exclude
        )
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        (folder / "refused.txt").write_text(str(error))
        return
    save_file(
        {n: t.clone().contiguous() for n, t in state.items()}, folder / "expected.safetensors"
    )


def main() -> None:
    """Make every case in the folder that the command line names."""
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    ranks = Ranks()
    for case in CASES:
        engine = train(case, ranks.world_size)
        for suffix, exclude in (("", False), ("-trained", True))[: 2 if case.lora else 1]:
            folder = root / f"{case.name}{suffix}"
            engine.save_checkpoint(str(folder), exclude_frozen_parameters=exclude)
            ranks.barrier()
            if ranks.first:
                model = engine.module
                described = model.peft_config["default"] if case.lora else model.config
                described.save_pretrained(str(folder))
                expect(folder, exclude=exclude)
        engine.destroy()
        ranks.barrier()
    ranks.leave()
    end_process()


if __name__ == "__main__":
    main()
