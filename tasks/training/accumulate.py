"""Gradient accumulation: forward and backward passes over the rows of one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.engine.nan_guard import BROKEN, Watch, needs_watching
from tasks.training.job import TrainJob
from tasks.training.objectives import Loss
from tasks.training.objectives.forward_passes import Sums

Row = TypeVar("Row")
"""A row as `loss_of` takes it."""


class Accumulated(NamedTuple):
    """Loss and metrics of one optimizer step, summed over all rows and ranks.

    Attributes:
        measures: `loss` and the metrics of the objective.
        broken: True if a gradient is not finite. Always False if `needs_watching` is False:
            DeepSpeed then looks at gradients itself, in `engine.step()`.
    """

    measures: dict[str, float]
    broken: bool


class Accumulator:
    """Accumulates the gradients of optimizer steps on one engine.

    Args:
        engine: the DeepSpeed engine; it trains the parameters that require gradients now.
        ranks: the process group.
        job: settings of the run.

    Attributes:
        losses: the loss of each row of the last step.
    """

    def __init__(self, engine: Any, ranks: Ranks, job: TrainJob) -> None:
        self._engine = engine
        self._ranks = ranks
        self._watch = Watch(engine.module) if needs_watching(job) else None
        self.losses: list[torch.Tensor] = []

    def close(self) -> None:
        """Remove the gradient hooks from the model."""
        if self._watch is not None:
            self._watch.close()

    def passes(self, rows: Sequence[Row], loss_of: Callable[[Row], Loss]) -> Accumulated:
        """Run forward and backward of this rank's rows. The caller calls `engine.step()`.

        Args:
            rows: the rows; the same number of rows on every rank.
            loss_of: returns a row's part of the loss of the whole step.
        """
        # DeepSpeed divides by accumulation steps and averages over ranks; the loss already is a
        # part of the whole step's. Ranks that share a row have its whole loss, and each the
        # gradient of its own tokens.
        undo = len(rows) * self._ranks.world_size
        sums = Sums(self._ranks)
        self.losses = []
        for place, chosen in enumerate(rows):
            if place:
                self._engine.step()  # counts the row before; changes no weight
            loss = loss_of(chosen)
            self._engine.backward(loss.value * undo)
            self.losses.append(loss.value.detach())
            sums.add({"loss": loss.value, **loss.measures}, counted=self._ranks.leads)
            if self._watch is not None:
                sums.add(self._watch.broken())
        measures = sums.total()
        return Accumulated(measures, bool(measures.pop(BROKEN, 0.0)))
