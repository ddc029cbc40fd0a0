"""Supervised fine-tuning: negative log-likelihood of supervised tokens, given all before them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tasks.training.objectives import Loss, Said
from tasks.training.tokens.order import Counts
from tasks.training.tokens.packing import Row


@dataclass(frozen=True)
class Sft:
    """Mean cross-entropy, in nats a supervised token."""

    roles: ClassVar[tuple[str, ...]] = ("text",)
    head: ClassVar[str] = "tokens"
    needs_reference: ClassVar[bool] = False
    baseline_role: ClassVar[str | None] = None

    def loss(self, said: Said, row: Row, counts: Counts) -> Loss:
        """Sum of the row's cross-entropies over the step's supervised tokens."""
        assert said.logprobs is not None
        return Loss(-said.logprobs.sum() / counts.supervised[0], {})
