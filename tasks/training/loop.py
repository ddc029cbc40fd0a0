"""The training loop: optimizer steps, with evaluations and checkpoints between them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from tasks.core.errors import TrainingError
from tasks.core.events import emit, keep_in
from tasks.training.engine import checkpoint, saving
from tasks.training.engine.checkpoint import Progress
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.job import TrainJob
from tasks.training.objectives import Objective
from tasks.training.objectives.forward_passes import Passes, Sums
from tasks.training.selection import best_to_load, due, evaluate_if_due, has_stopped
from tasks.training.steps import Stepper, Taken
from tasks.training.tokens.examples import Examples
from tasks.training.tokens.order import Counts, Order

MAX_SKIPPED = 20
"""Consecutive steps in which fp16 may overflow. Each overflow halves the loss scale; after 20 it is
a millionth of what it was, and the loss scale is not the problem."""


@dataclass(frozen=True)
class Trainer:
    """A training run and its progress.

    Attributes:
        engine: the DeepSpeed engine.
        ranks: the process group.
        job: settings and paths of the run.
        objective: the loss.
        examples: training examples.
        heldout: evaluation examples.
        progress: updated by every step and evaluation.
        router: weight of the router loss of a mixture of experts.
    """

    engine: Any
    ranks: Ranks
    job: TrainJob
    objective: Objective
    examples: Examples
    heldout: Examples
    progress: Progress
    router: float = 0.0

    def run(self) -> dict[str, float]:
        """Take all remaining steps, with evaluations and checkpoints between them.

        Afterwards the engine holds the last weights or the best ones, as `train.keep` says. Emits
        the events "plan", "step" and "eval".

        Returns:
            The evaluation of the weights that the engine then holds, by name.

        Raises:
            TrainingError: loss or gradient is not finite, fp16 overflows in every step, or a
                checkpoint could not be written.
        """
        settings, progress = self.job.settings, self.progress
        order = Order(
            self.examples, settings.batch, seed=settings.seed, world_size=self.ranks.replicas
        )
        if self.ranks.first:
            epochs = order.epoch_at(order.steps)
            keep_in(self.job.checkpoints)
            emit("plan", steps=order.steps, epochs=epochs, taken=progress.step)
        if progress.before is None:
            progress.before = self.evaluate("before")
        stepper = Stepper(self._passes, self.job, self.examples, order)
        saver = saving.Saver(self.engine, self.job, self.ranks)
        while progress.step < order.steps and not has_stopped(progress, settings.evaluate):
            self._note(stepper.take(progress.step + 1), last=order.steps)
            if evaluate_if_due(progress, settings, order.steps, self.evaluate):
                saver.save(progress)
        stepper.close()
        return self._leave()

    def evaluate(self, when: str) -> dict[str, float]:
        """Return loss and metrics on the evaluation examples, by name. All ranks take part.

        Args:
            when: `before`, `during`, `after` or `best`; a field of the emitted event "eval".
        """
        begin, passes = time.perf_counter(), self._passes
        rounds = passes.heldout(self.heldout, self.job.settings.batch)
        counts = Counts.of(self.heldout)
        baseline, sums = passes.baseline(self.heldout, rounds), Sums(self.ranks)
        with torch.no_grad(), passes.evaluating():
            for row in rounds:
                loss = passes.loss(self.heldout, row.chosen, counts=counts, baseline=baseline)
                sums.add({"loss": loss.value, **loss.measures}, counted=row.counted)
        metrics = self.objective.means(sums.total())
        seconds = time.perf_counter() - begin
        if self.ranks.first:
            about = {"when": when, "step": self.progress.step, "eval_s": seconds}
            emit("eval", **about, tokens=sum(counts.supervised), **metrics)
        return metrics

    @property
    def _passes(self) -> Passes:
        return Passes(self.engine, self.ranks, self.objective, self.router)

    def _note(self, taken: Taken, *, last: int) -> None:
        progress, record = self.progress, taken.record
        progress.step += 1
        progress.losses.append(record["loss"])
        progress.last = record
        progress.seconds += record["step_s"]
        progress.skipped = progress.skipped + 1 if taken.skipped else 0
        if self.job.settings.dtype == "float16":
            record["skipped"] = float(taken.skipped)
        shown = due(self.job.settings.log_every, progress.step) or progress.step == last
        if self.ranks.first and shown:
            emit("step", **record)
        if progress.skipped >= MAX_SKIPPED:
            good = checkpoint.last_good(self.job.checkpoints)
            raise TrainingError(
                f"fp16 overflowed in each of the last {MAX_SKIPPED} steps, up to step "
                f"{progress.step}; last good checkpoint: {good or 'none yet'}",
                hint="model.dtype=bfloat16, or a smaller train.lr",
            )

    def _leave(self) -> dict[str, float]:
        """Load the best weights if `train.keep=best`; return the evaluation of those kept."""
        best = best_to_load(self.progress, self.job.settings.evaluate)
        if best is None:
            return {k: v for k, v in self.progress.evaluations[-1].items() if k != "step"}
        path = self.job.checkpoints / checkpoint.name_of(best.step)
        saving.load_weights(self.engine, path, self.ranks)
        return self.evaluate("best")
