"""The training loop: optimizer steps, with evaluations and checkpoints between them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from tasks.core.errors import TrainingError
from tasks.core.events import emit, keep_in
from tasks.training.engine import checkpoint, saving
from tasks.training.engine.checkpoint import Progress
from tasks.training.job import TrainJob
from tasks.training.losses import Loss
from tasks.training.passes import Passes, Sums
from tasks.training.selection import best_to_load, due, evaluate_if_due, has_stopped
from tasks.training.steps import accumulate, begin_random, not_finite, set_lr, take
from tasks.training.tokens.examples import Examples
from tasks.training.tokens.order import Counts, Dealt, Order

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
            epochs = order.epoch_at(order.steps)
            keep_in(self.job.checkpoints)
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
        todo = order.step(step, passes.ranks.replica)
        baseline = passes.baseline(self.examples, todo.rows)

        def loss_of(row: Dealt) -> Loss:
            loss = passes.loss(self.examples, row.chosen, counts=todo.counts, baseline=baseline)
            if row.counted:
                return loss
            return Loss(loss.value * 0, {name: x * 0 for name, x in loss.measures.items()})

        measures, losses = accumulate(passes.engine, passes.ranks, todo.rows, loss_of)
        problem = "" if math.isfinite(measures["loss"]) else f"loss is {measures['loss']}"
        norm, skipped = 0.0, False
        if not problem:
            norm, skipped = take(passes.engine, half=settings.dtype == "float16")
            problem = "gradient is not finite" if math.isnan(norm) and not skipped else ""
        if problem:
            names = [[self.examples.names[i] for i in row.chosen] for row in todo.rows]
            what = f"{problem} in step {step}"
            raise not_finite(what, names, losses, ranks=passes.ranks, job=self.job)
        seconds = time.perf_counter() - begin
        return {
            "step": step,
            **passes.objective.means(measures),
            "lr": lr,
            "grad_norm": norm,
            "tokens_per_s": todo.counts.tokens / seconds,
            "step_s": seconds,
            "epoch": order.epoch_at(step),
            "skipped": float(skipped),
        }

    def evaluate(self, when: str) -> dict[str, float]:
        """Return loss and metrics on the evaluation examples, by name. All ranks take part."""
        begin, passes = time.perf_counter(), self.passes
        rounds = passes.heldout(self.heldout, self.job.settings.batch)
        counts = Counts.of(self.heldout)
        baseline, sums = passes.baseline(self.heldout, rounds), Sums(passes.ranks)
        with torch.no_grad(), passes.evaluating():
            for row in rounds:
                loss = passes.loss(self.heldout, row.chosen, counts=counts, baseline=baseline)
                sums.add({"loss": loss.value, **loss.measures}, counted=row.counted)
        metrics = passes.objective.means(sums.total())
        seconds = time.perf_counter() - begin
        if passes.ranks.first:
            about = {"when": when, "step": self.progress.step, "eval_s": seconds}
            emit("eval", **about, tokens=sum(counts.supervised), **metrics)
        return metrics

    def _note(self, record: dict[str, float], *, last: int) -> None:
        progress = self.progress
        skipped = record["skipped"]
        if self.job.settings.dtype != "float16":
            del record["skipped"]
        progress.step += 1
        progress.losses.append(record["loss"])
        progress.last = record
        progress.seconds += record["step_s"]
        progress.skipped = progress.skipped + 1 if skipped else 0
        shown = due(self.job.settings.log_every, progress.step) or progress.step == last
        if self.passes.ranks.first and shown:
            emit("step", **record)
        if progress.skipped >= MAX_SKIPPED:
            good = checkpoint.last_good(self.job.checkpoints)
            raise TrainingError(
                f"fp16 overflowed in each of the last {MAX_SKIPPED} steps, up to step "
                f"{progress.step}; last good checkpoint: {good or 'none yet'}",
                hint="model.dtype=bfloat16, or a smaller train.lr",
            )
