"""The training loop: optimizer steps, with evaluations and checkpoints between them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tasks.core.errors import TrainingError
from tasks.core.events import emit, keep_in
from tasks.training.engine import checkpoint, saving
from tasks.training.engine.checkpoint import Progress
from tasks.training.job import TrainJob
from tasks.training.passes import Passes, add_up
from tasks.training.selection import best_to_load, due, evaluate_if_due, has_stopped
from tasks.training.steps import accumulate, begin_random, set_lr, take
from tasks.training.tokens.examples import Examples
from tasks.training.tokens.order import Dealt, Order, Totals

MAX_SKIPPED = 20
"""Consecutive steps in which fp16 may overflow. Each overflow halves the loss scale; after 20 it is
a millionth of what it was, and the loss scale is not the problem."""


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

        They are the last ones or the best ones, as `train.keep` says. Emits the events "plan",
        "step" and "eval". TrainingError if loss or gradient is not finite, fp16 overflows in every
        step, or a checkpoint could not be written.
        """
        settings, progress, ranks = self.job.settings, self.progress, self.passes.ranks
        order = Order(self.examples, settings.batch, seed=settings.seed, world_size=ranks.replicas)
        if ranks.first:
            keep_in(self.job.checkpoints)
            epochs = order.epoch_at(order.steps)
            emit("plan", steps=order.steps, epochs=epochs, taken=progress.step)
        if progress.before is None:
            progress.before = self.evaluate("before")
        saver = saving.Saver(self.passes.engine, self.job, ranks)
        while progress.step < order.steps and not has_stopped(progress, settings.evaluate):
            self._note(self.step(progress.step + 1, order), last=order.steps)
            if evaluate_if_due(progress, settings, order.steps, self.evaluate):
                saver.save(progress)
        best = best_to_load(progress, settings.evaluate)
        if best is None:
            return {k: v for k, v in progress.evaluations[-1].items() if k != "step"}
        saving.load(self.passes.engine, self.job.checkpoints / checkpoint.name_of(best.step))
        return self.evaluate("best")

    def step(self, step: int, order: Order) -> dict[str, float]:
        """Take step number `step`, counted from 1; return its metrics by name.

        `skipped` is 1 if fp16 overflowed and no weight changed.
        """
        begin, settings, passes = time.perf_counter(), self.job.settings, self.passes
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
        norm, skipped = take(passes.engine, half=settings.dtype == "float16")
        if math.isnan(norm) and not skipped:
            raise self._not_finite(f"gradient is not finite in step {step}", rows, losses)
        seconds = time.perf_counter() - begin
        return {
            "step": step,
            **passes.objective.means(metrics),
            "lr": lr,
            "grad_norm": norm,
            "tokens_per_s": totals.tokens / seconds,
            "step_s": seconds,
            "epoch": order.epoch_at(step),
            "skipped": float(skipped),
        }

    def evaluate(self, when: str) -> dict[str, float]:
        """Return loss and metrics on the evaluation examples, by name. All ranks take part."""
        begin, passes = time.perf_counter(), self.passes
        rounds = passes.heldout(self.heldout, self.job.settings.batch)
        totals = Totals.of(self.heldout.supervised, self.heldout.lengths)
        baseline = passes.baseline(self.heldout, rounds)
        with torch.no_grad(), passes.evaluating():
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

    def _note(self, record: dict[str, float], *, last: int) -> None:
        progress = self.progress
        progress.skipped = progress.skipped + 1 if record["skipped"] else 0
        if self.job.settings.dtype != "float16":
            del record["skipped"]
        progress.step += 1
        progress.losses.append(record["loss"])
        progress.last = record
        progress.seconds += record["step_s"]
        shown = due(self.job.settings.log_every, progress.step) or progress.step == last
        if self.passes.ranks.first and shown:
            emit("step", **record)
        if progress.skipped >= MAX_SKIPPED:
            raise TrainingError(
                f"fp16 overflowed in each of the last {MAX_SKIPPED} steps, up to step "
                f"{progress.step}; {checkpoint.last_good_of(self.job)}",
                hint="model.dtype=bfloat16, or a smaller train.lr",
            )
