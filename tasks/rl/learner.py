"""An engine that takes optimizer steps, and looks at losses and gradients before a weight moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tasks.core.errors import TrainingError
from tasks.training.accumulate import Accumulator
from tasks.training.engine import checkpoint
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.job import TrainJob
from tasks.training.objectives import Loss


class Learner:
    """Takes optimizer steps with one engine.

    Args:
        engine: DeepSpeed's; what it trains is what asks for gradients now.
        ranks: this process among its peers.
        job: what to do.
        whose: of whom an error speaks: "the policy's".
        hint: what to type after it.
    """

    def __init__(self, engine: Any, ranks: Ranks, job: TrainJob, *, whose: str, hint: str) -> None:
        self._engine = engine
        self._job = job
        self._whose = whose
        self._hint = hint
        self._accumulator = Accumulator(engine, ranks, job)

    def step(
        self,
        number: int,
        rows: Sequence[list[int]],
        loss_of: Callable[[list[int]], Loss],
        check: Callable[[], None] | None = None,
    ) -> tuple[dict[str, float], float]:
        """Optimizer step `number` with this rank's rows of a minibatch.

        Args:
            number: 1, 2, ...
            rows: each one's replies.
            loss_of: a row's loss.
            check: raises what is to end training, on every rank, after the passes and before a
                weight moves.

        Returns:
            Measures of the minibatch over all ranks, `loss` among them, and the gradient's norm
            before it was clipped.

        Raises:
            TrainingError: on every rank, before a weight has moved, when a loss or a gradient is
                not finite.
        """
        found, broken = self._accumulator.passes(rows, loss_of)
        for name, value in sorted(found.items()):
            if not math.isfinite(value):
                raise self._error(number, f"{name} is {value}")
        if broken:
            raise self._error(number, "gradient is not finite")
        if check is not None:
            check()
        self._engine.step()
        if not self._engine.was_step_applied() and self._job.settings.dtype != "float16":
            raise self._error(number, "gradient is not finite")
        return found, float(self._engine.get_global_grad_norm() or 0.0)

    def _error(self, number: int, what: str) -> TrainingError:
        good = checkpoint.last_good(self._job.checkpoints)
        return TrainingError(
            f"step {number}: {self._whose} {what}; last good checkpoint: {good or 'none yet'}",
            hint=self._hint,
        )
