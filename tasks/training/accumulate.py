"""The passes of one optimizer step: all its rows forward and backward, nothing moved yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.engine.nan_guard import BROKEN, Watch, needs_watching
from tasks.training.job import TrainJob
from tasks.training.objectives import Loss
from tasks.training.objectives.forward_passes import Sums

Row = TypeVar("Row", bound=Sequence[int])
"""Which examples lie in it."""


class Found(NamedTuple):
    """What the passes of a step found, over all ranks.

    Attributes:
        measures: `loss` and what else losses measure, summed over rows.
        broken: whether a gradient was seen that is not finite. DeepSpeed looks for that itself
            where `needs_watching` says no; then it is in its `step` that one shows.
    """

    measures: dict[str, float]
    broken: bool


class Accumulator:
    """Takes the passes of one optimizer step after the other, with one engine.

    Args:
        engine: DeepSpeed's; what it trains is what asks for gradients now.
        ranks: this process among its peers.
        job: what to do.
    """

    def __init__(self, engine: Any, ranks: Ranks, job: TrainJob) -> None:
        self._engine = engine
        self._ranks = ranks
        self._watch = Watch(engine.module) if needs_watching(job) else None

    def close(self) -> None:
        """Leave the model without what was put into it."""
        if self._watch is not None:
            self._watch.close()

    def passes(self, rows: Sequence[Row], loss_of: Callable[[Row], Loss]) -> Found:
        """Forward and backward of this rank's rows; `engine.step()` is left to the caller.

        Args:
            rows: each one's examples; as many on every rank.
            loss_of: a row's part of the whole step's loss.
        """
        # DeepSpeed divides by accumulation steps and averages over ranks: undo both.
        undo = len(rows) * self._ranks.world_size
        sums = Sums(self._ranks)
        for place, chosen in enumerate(rows):
            if place:
                self._engine.step()  # of the row before: counts, and moves nothing
            loss = loss_of(chosen)
            self._engine.backward(loss.value * undo)
            sums.add({"loss": loss.value, **loss.measures})
            if self._watch is not None:
                sums.add(self._watch.broken())
        found = sums.total()
        return Found(found, bool(found.pop(BROKEN, 0.0)))
