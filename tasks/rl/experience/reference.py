"""The reference: what the policy was before the first step.

With an adapter it is the policy with the adapter as it began: switched off, or as the step before
left it. A policy that is trained whole needs a frozen copy; under ZeRO-3 it is partitioned like the
policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tasks.training.engine.deepspeed_engine import Ranks, partitioned_engine
from tasks.training.job import TrainJob
from tasks.training.model.adapter import as_it_began
from tasks.training.model.build import load_model
from tasks.training.model.packed_model import Asked
from tasks.training.tokens.packing import Row

Reference = Callable[[Row, Asked], torch.Tensor]
"""A row and what is asked -> (N,) log-probabilities of its supervised tokens."""


def open_reference(
    job: TrainJob, ranks: Ranks, *, engine: Any, config: dict[str, Any], tokenizer: Any
) -> Reference:
    """The reference of a policy.

    Args:
        job: what is trained.
        ranks: this process among its peers.
        engine: DeepSpeed's around the policy.
        config: the policy's DeepSpeed configuration.
        tokenizer: the policy's.
    """
    if job.settings.peft.kind != "none":

        def at_the_beginning(row: Row, asked: Asked) -> torch.Tensor:
            with as_it_began(engine.module):
                out: torch.Tensor = engine(row=row, asked=asked)
            return out

        return at_the_beginning
    copy = _frozen_copy(job, ranks, config, tokenizer)

    def of_copy(row: Row, asked: Asked) -> torch.Tensor:
        out: torch.Tensor = copy(row=row, asked=asked)
        return out

    return of_copy


def _frozen_copy(job: TrainJob, ranks: Ranks, config: dict[str, Any], tokenizer: Any) -> Any:
    plain = replace(job, settings=replace(job.settings, gradient_checkpointing=False))
    model = load_model(plain, ranks, config, tokenizer=tokenizer, head="tokens")
    model.requires_grad_(False)
    if config["zero_optimization"]["stage"] != 3:
        return model.to(ranks.device).eval()
    return partitioned_engine(model, config)
