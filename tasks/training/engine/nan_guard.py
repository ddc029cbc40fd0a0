"""Losses and gradients that are not finite: noticed in time, and traced to where they came from."""

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
    """Looks at each gradient as the backward pass makes it, before DeepSpeed takes it away."""

    def __init__(self, model: Any) -> None:
        self._seen: list[tuple[str, torch.Tensor]] = []
        self._handles = [
            parameter.register_hook(partial(self._look, name))
            for name, parameter in trainable(model).items()
        ]

    def _look(self, name: str, gradient: torch.Tensor) -> None:
        self._seen.append((name, ~torch.isfinite(gradient).all()))

    def broken(self) -> Mapping[str, torch.Tensor]:
        """How many gradients were not finite since the last call, as a measure; a scalar."""
        flags = [flag for _, flag in self._seen]
        self._seen.clear()
        return {BROKEN: torch.stack(flags).sum().float()}

    def first(self) -> str | None:
        """The first tensor in the order of the backward pass whose gradient was not finite."""
        found = next((name for name, flag in self._seen if bool(flag)), None)
        self._seen.clear()
        return found

    def close(self) -> None:
        """Look no longer."""
        for handle in self._handles:
            handle.remove()


BROKEN = "gradients_not_finite"


def needs_watching(job: TrainJob) -> bool:
    """Whether DeepSpeed would step with gradients that are not finite.

    It looks at them itself with 16-bit weights, and under ZeRO-3 with any.
    """
    return job.settings.dtype == "float32" and job.settings.zero.stage < 3


class _Finding(NamedTuple):
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
    """Repeats a step that went wrong, row by row, to name rank, samples and tensor.

    A step is a function of weights, seed, step and rank, and no weight has moved yet: what went
    wrong goes wrong again. All ranks take part.
    """

    passes: Passes
    job: TrainJob
    examples: Examples

    def error(
        self, what: str, todo: Step, *, step: int, baseline: torch.Tensor | None
    ) -> TrainingError:
        """The error to raise, the same on every rank.

        Args:
            what: that was not finite, with its value.
            todo: the rows of this rank.
            step: number of the step.
            baseline: of the step.
        """
        ranks = self.passes.ranks
        found = sorted(f for part in ranks.all_objects(self._repeat(todo, baseline)) for f in part)
        first = next((f for f in found if f.tensor), found[0] if found else None)
        where = ""
        if first is not None:
            tensor = f", first in the gradient of {first.tensor}" if first.tensor else ""
            where = f", from rank {first.rank}{tensor}"
        good = checkpoint.last_good(self.job.checkpoints)
        return TrainingError(
            f"{what} in step {step}{where}; last good checkpoint: {good or 'none yet'}",
            details=[str(finding) for finding in found[:20]],
            hint=f"train.lr={self.job.settings.optim.lr / 10:g}, or look at the data of this step",
        )

    def _repeat(self, todo: Step, baseline: torch.Tensor | None) -> list[_Finding]:
        engine, found = self.passes.engine, []
        watch = Watch(engine.module)
        for number, chosen in enumerate(todo.rows, 1):
            loss = self.passes.loss(
                self.examples, chosen, counts=todo.counts, baseline=baseline
            ).value
            engine.backward(loss)
            value, tensor = float(loss.detach()), watch.first()
            if tensor is not None or not math.isfinite(value):
                names = [self.examples.names[i] for i in chosen]
                found.append(_Finding(self.passes.ranks.rank, number, names, value, tensor))
        watch.close()
        return found
