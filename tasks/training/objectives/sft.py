"""Supervised fine-tuning: negative log-likelihood of the supervised tokens."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.training.objectives import Loss, ModelOutput, Objective
from tasks.training.tokens.order import Counts
from tasks.training.tokens.packing import Row


@dataclass(frozen=True)
class Sft(Objective):
    """Mean cross-entropy in nats per supervised token."""

    def loss(self, output: ModelOutput, row: Row, counts: Counts) -> Loss:
        """Return the sum over the row's tokens, divided by the supervised tokens of the step."""
        assert output.logprobs is not None
        return Loss(-output.logprobs.sum() / counts.supervised[0], {})
