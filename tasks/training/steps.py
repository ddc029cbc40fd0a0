"""Parts of an optimizer step, for training on data and online RL: `Accumulator`, `set_lr`, seeds.

A step depends on weights, optimizer state, seed and step number alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from tasks.core.errors import TrainingError
from tasks.training.engine import checkpoint
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.engine.partitions import trainable
from tasks.training.job import Optim, TrainJob
from tasks.training.losses import Loss
from tasks.training.passes import Sums

BROKEN = "gradients_not_finite"
_BELOW_ONE = math.nextafter(1.0, 0.0)
"""Largest last rate of `polynomial`: transformers refuses one that is not below the peak."""
Row = TypeVar("Row")
"""A row as `loss_of` takes it."""


class Accumulated(NamedTuple):
    """Loss and metrics of one optimizer step, summed over all rows and ranks.

    Attributes:
        measures: `loss` and the metrics of the objective.
        broken: True if a gradient is not finite. DeepSpeed looks at gradients itself, in
            `engine.step()`, for 16-bit weights and under ZeRO-3; it is always False then.
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
        settings = job.settings
        watched = settings.dtype == "float32" and settings.zero.stage < 3
        self._watch = Watch(engine.module) if watched else None
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
                sums.add({BROKEN: self._watch.broken()})
        measures = sums.total()
        return Accumulated(measures, bool(measures.pop(BROKEN, 0.0)))


class Watch:
    """Checks each gradient in a hook of the backward pass, before DeepSpeed reduces it."""

    def __init__(self, model: Any) -> None:
        self._seen: list[torch.Tensor] = []
        self._handles = [each.register_hook(self._look) for each in trainable(model).values()]

    def _look(self, gradient: torch.Tensor) -> None:
        self._seen.append(~torch.isfinite(gradient).all())

    def broken(self) -> torch.Tensor:
        """Return the number of gradients since the last call that are not finite."""
        flags = torch.stack(self._seen)
        self._seen.clear()
        return flags.sum().float()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def not_finite(
    what: str,
    samples: Sequence[Sequence[str]],
    losses: Sequence[float],
    *,
    ranks: Ranks,
    job: TrainJob,
) -> TrainingError:
    """Return the error of a step, the same on every rank. All ranks take part.

    Args:
        what: the problem, for example "loss is nan in step 3".
        samples: names of the samples in each row of this rank.
        losses: losses of these rows.
        ranks: the process group.
        job: settings and paths of the run.
    """
    mine = [
        f"rank {ranks.rank}, row {number} (samples {', '.join(names[:8])}"
        f"{', ...' if len(names) > 8 else ''}): loss {loss:.6g}"
        for number, (names, loss) in enumerate(zip(samples, losses, strict=True), 1)
        if not math.isfinite(loss)
    ]
    rows = [line for of_rank in ranks.all_objects(mine) for line in of_rank]
    first = f", from {rows[0].partition(' (')[0]}" if rows else ""
    good = checkpoint.last_good(job.checkpoints)
    return TrainingError(
        f"{what}{first}; last good checkpoint: {good or 'none yet'}",
        details=rows[:20],
        hint=f"train.lr={job.settings.optim.lr / 10:g}, or look at the data of this step",
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


def warmup_steps(total: int, ratio: float) -> int:
    """Return the steps of linear warm-up: `ratio` of all steps, rounded up; 0 for ratio 0."""
    return min(total, math.ceil(total * ratio))


def factor(optim: Optim, *, step: int, total: int) -> float:
    """Return the learning rate of one step over the peak rate, by transformers' own schedules.

    Step s of n gets the rate that `transformers.get_scheduler` gives at step s of n + 1. There a
    run begins with a step at rate 0; here it begins one step later, so that no step is wasted.

    Args:
        optim: the schedule, its warm-up and its options.
        step: the step about to be taken, 1 to `total`.
        total: steps of the run.
    """
    return float(_schedule(optim, total)(step))


@lru_cache
def _schedule(optim: Optim, total: int) -> Callable[[int], float]:
    """Build transformers' schedule around a throw-away optimizer, and return its function."""
    from transformers import get_scheduler

    warmup, decay = warmup_steps(total, optim.warmup_ratio), math.ceil(total * optim.decay_ratio)
    options: dict[str, dict[str, Any]] = {
        "cosine_with_min_lr": {"min_lr_rate": optim.min_lr_ratio},
        "cosine_with_restarts": {"num_cycles": optim.num_cycles},
        "polynomial": {"lr_end": min(optim.min_lr_ratio, _BELOW_ONE), "power": optim.power},
        # A decay that reaches into the warm-up begins after it, from the peak.
        "warmup_stable_decay": {
            "num_stable_steps": max(0, total + 1 - decay - warmup),
            "num_decay_steps": decay,
            "min_lr_ratio": optim.min_lr_ratio,
        },
    }
    made = get_scheduler(
        optim.scheduler,
        torch.optim.SGD([torch.zeros(1)], lr=1.0),
        num_warmup_steps=warmup,
        num_training_steps=None if optim.scheduler == "warmup_stable_decay" else total + 1,
        scheduler_specific_kwargs=options.get(optim.scheduler),
    )
    rate: Callable[[int], float] = made.lr_lambdas[0]
    return rate
