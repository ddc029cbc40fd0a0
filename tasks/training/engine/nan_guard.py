"""NaN and infinity in losses and gradients: detect them before a weight changes, name the cause."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from tasks.core.errors import TrainingError
from tasks.training.engine import checkpoint
from tasks.training.engine.partitions import trainable
from tasks.training.job import TrainJob
from tasks.training.objectives.forward_passes import Passes
from tasks.training.tokens.examples import Examples
from tasks.training.tokens.order import Step


class Watch:
    """Checks each gradient in a hook of the backward pass, before DeepSpeed reduces it."""

    def __init__(self, model: Any) -> None:
        self._seen: list[tuple[str, torch.Tensor]] = []
        self._handles = [
            parameter.register_hook(partial(self._look, name))
            for name, parameter in trainable(model).items()
        ]

    def _look(self, name: str, gradient: torch.Tensor) -> None:
        self._seen.append((name, ~torch.isfinite(gradient).all()))

    def broken(self) -> Mapping[str, torch.Tensor]:
        """Return the number of gradients since the last call that are not finite, as a metric."""
        flags = [flag for _, flag in self._seen]
        self._seen.clear()
        return {BROKEN: torch.stack(flags).sum().float()}

    def first(self) -> str | None:
        """Return the first tensor of the backward pass whose gradient is not finite, or None."""
        tensor = next((name for name, flag in self._seen if bool(flag)), None)
        self._seen.clear()
        return tensor

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


BROKEN = "gradients_not_finite"


def needs_watching(job: TrainJob) -> bool:
    """Return True if DeepSpeed would take a step with gradients that are not finite.

    DeepSpeed checks gradients itself for 16-bit weights, and under ZeRO-3 for all weights.
    """
    return job.settings.dtype == "float32" and job.settings.zero.stage < 3


class _Failure(NamedTuple):
    rank: int
    row: int
    samples: list[str]
    loss: float
    tensor: str | None

    def __str__(self) -> str:
        shown = ", ".join(self.samples[:8]) + ", ..." * (len(self.samples) > 8)
        where = f"; first gradient not finite: {self.tensor}" if self.tensor else ""
        return f"rank {self.rank}, row {self.row} (samples {shown}): loss {self.loss:.6g}{where}"


@dataclass(frozen=True)
class Trace:
    """Repeats a failed step row by row, to name rank, samples and tensor. All ranks take part.

    A step depends on weights, seed, step and rank alone, and no weight has changed yet, so the
    step fails again in the same place.
    """

    passes: Passes
    job: TrainJob
    examples: Examples

    def error(
        self, what: str, todo: Step, *, step: int, baseline: torch.Tensor | None
    ) -> TrainingError:
        """Return the error to raise, the same on every rank.

        Args:
            what: the problem, for example "loss is nan".
            todo: the rows of this rank.
            step: number of the step.
            baseline: result of `Passes.baseline` in this step.
        """
        ranks = self.passes.ranks
        everywhere = ranks.all_objects(self._repeat(todo, baseline))
        failures = sorted(failure for of_rank in everywhere for failure in of_rank)
        first = next((f for f in failures if f.tensor), failures[0] if failures else None)
        where = ""
        if first is not None:
            tensor = f", first in the gradient of {first.tensor}" if first.tensor else ""
            where = f", from rank {first.rank}{tensor}"
        good = checkpoint.last_good(self.job.checkpoints)
        return TrainingError(
            f"{what} in step {step}{where}; last good checkpoint: {good or 'none yet'}",
            details=[str(failure) for failure in failures[:20]],
            hint=f"train.lr={self.job.settings.optim.lr / 10:g}, or look at the data of this step",
        )

    def _repeat(self, todo: Step, baseline: torch.Tensor | None) -> list[_Failure]:
        engine, failures = self.passes.engine, []
        watch = Watch(engine.module)
        for number, (chosen, _) in enumerate(todo.rows, 1):
            loss = self.passes.loss(
                self.examples, chosen, counts=todo.counts, baseline=baseline
            ).value
            engine.backward(loss)
            value, tensor = float(loss.detach()), watch.first()
            if tensor is not None or not math.isfinite(value):
                names = [self.examples.names[i] for i in chosen]
                failures.append(_Failure(self.passes.ranks.rank, number, names, value, tensor))
        watch.close()
        return failures
