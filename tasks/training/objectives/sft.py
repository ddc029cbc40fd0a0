"""Supervised fine-tuning: negative log-likelihood of the supervised tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tasks.training.objectives import Loss, ModelOutput
from tasks.training.tokens.order import Counts
from tasks.training.tokens.packing import Row


@dataclass(frozen=True)
class Sft:
    """Mean cross-entropy in nats per supervised token."""

    roles: ClassVar[tuple[str, ...]] = ("text",)
    head: ClassVar[str] = "tokens"
    needs_reference: ClassVar[bool] = False
    baseline_role: ClassVar[str | None] = None

    def loss(self, output: ModelOutput, row: Row, counts: Counts) -> Loss:
        """Return the sum over the row's tokens, divided by the supervised tokens of the step."""
        assert output.logprobs is not None
        return Loss(-output.logprobs.sum() / counts.supervised[0], {})
