"""The reference model: the policy before its first step.

With an adapter it is the policy with the adapter switched off, or as the previous step left it.
With full fine-tuning it is a frozen copy; under ZeRO-3 it is partitioned like the policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tasks.training.engine.deepspeed_engine import Ranks, partitioned_engine
from tasks.training.job import TrainJob
from tasks.training.model.adapter import initial_weights
from tasks.training.model.build import load_model
from tasks.training.model.packed_model import TokenOutputs
from tasks.training.tokens.packing import Row

Reference = Callable[[Row, TokenOutputs], torch.Tensor]
"""Takes a packed row and options; returns (N,) log-probabilities of its supervised tokens."""


def open_reference(
    job: TrainJob, ranks: Ranks, *, engine: Any, config: dict[str, Any], tokenizer: Any
) -> Reference:
    """Return the reference of a policy."""
    if job.settings.peft.kind == "none":
        copy = _frozen_copy(job, ranks, config, tokenizer)
        return lambda row, outputs: copy(row=row, outputs=outputs)

    def initial_policy(row: Row, outputs: TokenOutputs) -> torch.Tensor:
        with initial_weights(engine.module):
            out: torch.Tensor = engine(row=row, outputs=outputs)
        return out

    return initial_policy


def _frozen_copy(job: TrainJob, ranks: Ranks, config: dict[str, Any], tokenizer: Any) -> Any:
    plain = replace(job, settings=replace(job.settings, gradient_checkpointing=False))
    model = load_model(plain, ranks, config, tokenizer=tokenizer, head="tokens")
    model.requires_grad_(False)
    if config["zero_optimization"]["stage"] != 3:
        return model.to(ranks.device).eval()
    return partitioned_engine(model, config)
