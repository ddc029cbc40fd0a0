"""The training loop: optimizer steps, with evaluations and checkpoints between them.

A step depends on weights, optimizer state, seed and step number alone. Its parts (`accumulate`,
`take`, `set_lr`, `begin_random`) are those of online RL, too.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch

from tasks.core.errors import TrainingError
from tasks.core.events import emit
from tasks.training.engine import checkpoint, saving
from tasks.training.engine.checkpoint import Progress
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.job import Optim, TrainJob
from tasks.training.losses import Loss
from tasks.training.model.packed_model import evaluating, model_of
from tasks.training.passes import Passes, add_up
from tasks.training.selection import run_steps
from tasks.training.tokens.examples import Examples
from tasks.training.tokens.rows import Dealt, Order, Totals

MAX_SKIPPED = 20
"""Consecutive steps in which fp16 may overflow. Each overflow halves the loss scale; after 20 it is
a millionth of what it was, and the loss scale is not the problem."""


Row = TypeVar("Row")
"""A row as `loss_of` takes it."""


@dataclass(frozen=True)
class Trainer:
    """A training run; steps and evaluations change `progress`."""

    passes: Passes
    job: TrainJob
    examples: Examples
    heldout: Examples
    progress: Progress

    def run(self) -> dict[str, float]:
        """Take all remaining steps; return the evaluation of the weights that the engine then has.

        Emits the events "plan", "step" and "eval". TrainingError if loss or gradient is not finite,
        fp16 overflows in every step, or a checkpoint could not be written.
        """
        job, passes, progress = self.job, self.passes, self.progress
        order = Order(
            self.examples, job.settings.batch, seed=job.settings.seed,
            world_size=passes.ranks.replicas, padded=model_of(passes.engine.module).padded_rows,
        )  # fmt: skip
        return run_steps(
            job,
            progress,
            order.steps,
            order.epoch_at(order.steps),
            first=passes.ranks.first,
            step=lambda step: self.step(step, order),
            evaluate=self.evaluate,
            save=lambda last: saving.save(passes.engine, job, passes.ranks, progress, last=last),
            load=lambda path: saving.load(passes.engine, path),
        )

    def step(self, step: int, order: Order) -> dict[str, float]:
        """Take step number `step`, counted from 1; return its metrics by name.

        With fp16 `skipped` is 1 if it overflowed and no weight changed.
        """
        begin, settings, passes = time.perf_counter(), self.job.settings, self.passes
        progress, half = self.progress, settings.dtype == "float16"
        begin_random(settings.seed, step=step, rank=passes.ranks.rank)
        lr = set_lr(passes.engine, settings.optim, step=step, steps=order.steps)
        rows, totals = order.step(step, passes.ranks.replica)
        baseline = passes.baseline(self.examples, rows)
        metrics, losses = accumulate(
            passes.engine, passes.ranks, rows,
            lambda row: passes.loss(self.examples, row, totals, baseline),
        )  # fmt: skip
        if not math.isfinite(metrics["loss"]):
            raise self._not_finite(f"loss is {metrics['loss']} in step {step}", rows, losses)
        norm, skipped = take(passes.engine, half=half)
        if math.isnan(norm) and not skipped:
            raise self._not_finite(f"gradient is not finite in step {step}", rows, losses)
        progress.skipped = progress.skipped + 1 if skipped else 0
        if progress.skipped >= MAX_SKIPPED:
            raise TrainingError(
                f"fp16 overflowed in each of the last {MAX_SKIPPED} steps, up to step {step}; "
                f"{checkpoint.last_good_of(self.job)}",
                hint="model.dtype=bfloat16, or a smaller train.lr",
            )
        seconds = time.perf_counter() - begin
        return {
            "step": step,
            **passes.objective.means(metrics),
            "lr": lr,
            "grad_norm": norm,
            "tokens_per_s": totals.tokens / seconds,
            "step_s": seconds,
            "epoch": order.epoch_at(step),
            **({"skipped": float(skipped)} if half else {}),
        }

    def evaluate(self, when: str) -> dict[str, float]:
        """Return loss and metrics on the evaluation examples, by name. All ranks take part."""
        begin, passes = time.perf_counter(), self.passes
        rounds = passes.heldout(self.heldout, self.job.settings.batch)
        totals = Totals.of(self.heldout.supervised, self.heldout.lengths)
        baseline = passes.baseline(self.heldout, rounds)
        with evaluating(passes.engine):
            losses = [passes.loss(self.heldout, row, totals, baseline) for row in rounds]
        sums = add_up(passes.ranks, [{"loss": loss.value, **loss.measures} for loss in losses])
        metrics = passes.objective.means(sums)
        if passes.ranks.first:
            about = {"when": when, "step": self.progress.step, "tokens": sum(totals.supervised)}
            emit("eval", **about, eval_s=time.perf_counter() - begin, **metrics)
        return metrics

    def _not_finite(
        self, what: str, rows: Sequence[Dealt], losses: Sequence[float]
    ) -> TrainingError:
        """Return the error of a step, the same on every rank; all take part.

        It names the samples of each row whose loss is not finite.
        """
        ranks, mine = self.passes.ranks, []
        for number, (row, loss) in enumerate(zip(rows, losses, strict=True), 1):
            names = [str(self.examples.names[i]) for i in row.chosen]
            more = ", ..." if len(names) > 8 else ""
            where = f"rank {ranks.rank}, row {number} (samples {', '.join(names[:8])}{more})"
            if not math.isfinite(loss):
                mine.append(f"{where}: loss {loss:.6g}")
        broken = [line for of_rank in ranks.all_objects(mine) for line in of_rank]
        first = f", from {broken[0].partition(' (')[0]}" if broken else ""
        return TrainingError(
            f"{what}{first}; {checkpoint.last_good_of(self.job)}",
            details=broken[:20],
            hint=f"train.lr={self.job.settings.optim.lr / 10:g}, or look at the data of this step",
        )


def accumulate(
    engine: Any, ranks: Ranks, rows: Sequence[Row], loss_of: Callable[[Row], Loss]
) -> tuple[dict[str, float], list[float]]:
    """Run forward and backward of this rank's rows of a step. The caller calls `engine.step()`.

    `loss_of` returns a row's part of the step's loss. Returns `loss` and the metrics, summed over
    all rows and ranks, and the loss of each row of this rank. All ranks have equally many rows.
    """
    # DeepSpeed divides by accumulation steps and averages over ranks; the loss already is a part of
    # the whole step's. Ranks that share a row have its whole loss, and each the gradient of its own
    # tokens.
    undo = len(rows) * ranks.world_size
    measured: list[dict[str, torch.Tensor]] = []
    for row in rows:
        if measured:
            engine.step()  # counts the row before; changes no weight
        loss = loss_of(row)
        engine.backward(loss.value * undo)
        measured.append({"loss": loss.value.detach(), **loss.measures})
    return add_up(ranks, measured, counted=ranks.leads), [float(row["loss"]) for row in measured]


def take(engine: Any, *, half: bool) -> tuple[float, bool]:
    """Let DeepSpeed update the weights; return the gradient's norm before clipping.

    The second result is True if fp16 overflowed and no weight changed. The norm is NaN if the
    gradient is not finite; DeepSpeed reports -1 or has skipped the step.
    """
    engine.step()
    skipped = not engine.was_step_applied()
    norm = float(engine.get_global_grad_norm() or 0.0)
    if half and skipped:
        return norm, True
    return (math.nan if skipped or not 0 <= norm < math.inf else norm), False


def set_lr(engine: Any, optim: Optim, *, step: int, steps: int) -> float:
    """Set the optimizer's learning rate for step `step` of `steps`, and return it."""
    lr = optim.lr * float(schedule(optim, steps)(step))
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


@lru_cache
def schedule(optim: Optim, total: int) -> Callable[[int], float]:
    """Return the learning rate of a step over the peak rate, by transformers' own schedules.

    Step s of n gets the rate that `transformers.get_scheduler` gives at step s of n + 1. There a
    run begins with a step at rate 0; here it begins one step later, so that no step is wasted.
    """
    from transformers import get_scheduler

    warmup = min(total, math.ceil(total * optim.warmup_ratio))
    decay = math.ceil(total * optim.decay_ratio)
    options: dict[str, dict[str, Any]] = {
        "cosine_with_min_lr": {"min_lr_rate": optim.min_lr_ratio},
        "cosine_with_restarts": {"num_cycles": optim.num_cycles},
        # transformers refuses a last rate that is not below the peak.
        "polynomial": {
            "lr_end": min(optim.min_lr_ratio, math.nextafter(1.0, 0.0)),
            "power": optim.power,
        },
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
