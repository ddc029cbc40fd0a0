"""One optimizer step. It depends on weights, optimizer state, seed and step number alone."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tasks.training.accumulate import Accumulator
from tasks.training.engine.nan_guard import not_finite
from tasks.training.engine.schedule import factor
from tasks.training.job import Optim, TrainJob
from tasks.training.objectives import Loss
from tasks.training.objectives.forward_passes import Passes
from tasks.training.tokens.examples import Examples
from tasks.training.tokens.order import Dealt, Order, Step


@dataclass(frozen=True)
class Taken:
    """Result of one optimizer step.

    Attributes:
        record: metrics by name: loss, lr, grad_norm, tokens_per_s, ...
        skipped: fp16 overflowed and the weights did not change.
    """

    record: dict[str, float]
    skipped: bool


class Stepper:
    """Takes optimizer steps.

    Args:
        passes: forward passes of the model under its objective.
        job: settings and paths of the run.
        examples: training examples.
        order: the examples of each step, rank and row.
    """

    def __init__(self, passes: Passes, job: TrainJob, examples: Examples, order: Order) -> None:
        self._passes = passes
        self._job = job
        self._examples = examples
        self._order = order
        self._engine: Any = passes.engine
        self._accumulator = Accumulator(self._engine, passes.ranks, job)

    def close(self) -> None:
        """Remove the hooks that steps put on the model."""
        self._accumulator.close()

    def take(self, step: int) -> Taken:
        """Take step number `step`, counted from 1.

        Raises:
            TrainingError: loss or gradient is not finite. Raised on every rank before a weight
                changes; names the step, and the rows whose loss is not finite.
        """
        begin, rank = time.perf_counter(), self._passes.ranks.rank
        begin_random(self._job.settings.seed, step=step, rank=rank)
        lr = set_lr(self._engine, self._job.settings.optim, step=step, steps=self._order.steps)
        todo = self._order.step(step, self._passes.ranks.replica)
        baseline = self._passes.baseline(self._examples, todo.rows)
        measures = self._accumulate(todo, step, baseline)
        self._engine.step()
        skipped = not self._engine.was_step_applied()
        if skipped and self._job.settings.dtype != "float16":
            self._refuse("gradient is not finite", todo, step)
        norm = float(self._engine.get_global_grad_norm() or 0.0)
        seconds = time.perf_counter() - begin
        speed = {"tokens_per_s": todo.counts.tokens / seconds, "step_s": seconds}
        record = {"step": step, **measures, "lr": lr, "grad_norm": norm, **speed}
        return Taken({**record, "epoch": self._order.epoch_at(step)}, skipped)

    def _accumulate(self, todo: Step, step: int, baseline: torch.Tensor | None) -> dict[str, float]:
        """Run forward and backward of all rows; return loss and metrics of the step."""

        def loss_of(row: Dealt) -> Loss:
            loss = self._passes.loss(
                self._examples, row.chosen, counts=todo.counts, baseline=baseline
            )
            if row.counted:
                return loss
            return Loss(loss.value * 0, {name: x * 0 for name, x in loss.measures.items()})

        measures, broken = self._accumulator.passes(todo.rows, loss_of)
        if not math.isfinite(measures["loss"]):
            self._refuse(f"loss is {measures['loss']}", todo, step)
        if broken:
            self._refuse("gradient is not finite", todo, step)
        return self._passes.objective.means(measures)

    def _refuse(self, what: str, todo: Step, step: int) -> None:
        names = [[self._examples.names[i] for i in row.chosen] for row in todo.rows]
        losses = [float(loss) for loss in self._accumulator.losses]
        raise not_finite(
            f"{what} in step {step}", names, losses, ranks=self._passes.ranks, job=self._job
        )


def set_lr(engine: Any, optim: Optim, *, step: int, steps: int) -> float:
    """Set the optimizer's learning rate for step `step` of `steps`, and return it."""
    lr = optim.lr * factor(optim, step=step, total=steps)
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
    return lr


def begin_random(seed: int, *, step: int, rank: int) -> None:
    """Seed torch, numpy and `random` from seed, step and rank.

    The dropout of a step then does not depend on the steps before it, and a resumed run needs no
    generator states.
    """
    seeds = np.random.SeedSequence([seed, step, rank]).generate_state(3)
    torch.manual_seed(int(seeds[0]))
    np.random.seed(int(seeds[1]))
    random.seed(int(seeds[2]))
