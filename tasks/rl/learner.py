"""Optimizer steps that refuse a loss or gradient that is not finite before a weight moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tasks.core.errors import TrainingError
from tasks.training.engine import checkpoint
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.job import TrainJob
from tasks.training.loop import MAX_SKIPPED
from tasks.training.losses import Loss
from tasks.training.steps import Accumulator


class Learner:
    """Takes optimizer steps with one engine.

    Args:
        engine: the DeepSpeed engine. It trains the parameters that require gradients when this
            object is made.
        ranks: this process and its peers.
        job: the training job.
        whose: subject of error messages, such as "the policy's".
        hint: what the user should type after an error.
    """

    def __init__(self, engine: Any, ranks: Ranks, job: TrainJob, *, whose: str, hint: str) -> None:
        self._engine = engine
        self._job = job
        self._whose = whose
        self._hint = hint
        self._accumulator = Accumulator(engine, ranks, job)
        self._skipped = 0

    def step(
        self,
        number: int,
        rows: Sequence[list[int]],
        loss_of: Callable[[list[int]], Loss],
        check: Callable[[], None] | None = None,
    ) -> dict[str, float]:
        """Take optimizer step `number` with this rank's rows of a minibatch.

        Args:
            number: 1, 2, ...
            rows: numbers of the responses in each row.
            loss_of: returns the loss of a row.
            check: called on every rank after the backward passes and before a weight moves; it may
                raise to end training.

        Returns:
            Means over the minibatch and all ranks, `loss` among them, and `grad_norm` before
            clipping. In fp16 `skipped` is 1 if the gradient overflowed; the step then has no norm.

        Raises:
            TrainingError: on every rank, before a weight has moved, if a loss or a gradient is not
                finite, or after `MAX_SKIPPED` skipped steps in a row.
        """
        metrics, bad_gradient = self._accumulator.passes(rows, loss_of)
        for name, value in sorted(metrics.items()):
            if not math.isfinite(value):
                raise self._error(number, f"{name} is {value}")
        if bad_gradient:
            raise self._error(number, "gradient is not finite")
        if check is not None:
            check()
        self._engine.step()
        skipped = not self._engine.was_step_applied()
        if skipped and self._job.settings.dtype != "float16":
            raise self._error(number, "gradient is not finite")
        self._skipped = self._skipped + 1 if skipped else 0
        if self._skipped >= MAX_SKIPPED:
            error = self._error(number, f"fp16 overflowed in each of the last {MAX_SKIPPED} steps")
            error.hint = f"model.dtype=bfloat16, or {error.hint}"
            raise error
        if self._job.settings.dtype == "float16":
            metrics["skipped"] = float(skipped)
        if not skipped:
            metrics["grad_norm"] = float(self._engine.get_global_grad_norm() or 0.0)
        return metrics

    def _error(self, number: int, what: str) -> TrainingError:
        good = checkpoint.last_good(self._job.checkpoints)
        return TrainingError(
            f"step {number}: {self._whose} {what}; last good checkpoint: {good or 'none yet'}",
            hint=self._hint,
        )
