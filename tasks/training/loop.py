"""Training steps and held-out evaluation."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tasks.errors import TrainingError
from tasks.events import emit
from tasks.training import checkpoint
from tasks.training.batches import Plan, collate, heldout_rounds
from tasks.training.chat import Sample
from tasks.training.engine import Ranks
from tasks.training.job import TrainJob
from tasks.training.objectives import Objective
from tasks.training.schedule import factor, warmup_steps

SHORT_ROW = 256
"""Tokens up to which the CPU's plain attention beats its flash attention, whose backward pass in
bf16 takes seven times as long on rows of 40 tokens. Longer rows need flash attention's memory."""


@dataclass(frozen=True)
class Trainer:
    """What every step needs: the engine, the ranks, the job, the objective, the padding."""

    engine: Any
    ranks: Ranks
    job: TrainJob
    objective: Objective
    pad_id: int

    def evaluate(self, samples: list[Sample], *, when: str) -> float:
        """Mean held-out loss in nats a supervised token; emits event "eval"."""
        size = max(8, self.job.settings.batch.micro_batch_size)
        rounds = heldout_rounds(
            samples, size=size, world_size=self.ranks.world_size, rank=self.ranks.rank
        )
        sums = torch.zeros(2, dtype=torch.float64)
        self.engine.eval()
        with torch.no_grad():
            for indices in rounds:
                chosen = [samples[i] for i in indices or (0,)]
                batch = collate(chosen, self.pad_id).to(self.ranks.device)
                loss = self.objective.loss_sum(self.engine, batch)
                if indices is not None:
                    sums += torch.tensor([float(loss), batch.supervised], dtype=torch.float64)
        self.engine.train()
        loss_sum, tokens = self.ranks.total(sums.to(self.ranks.device)).tolist()
        mean = float(loss_sum / tokens)
        if self.ranks.first:
            emit("eval", when=when, loss=mean, tokens=int(tokens))
        return mean

    def train(self, samples: list[Sample]) -> list[dict[str, float]]:
        """Take all steps; emits event "step". Returns one record a step.

        Raises:
            TrainingError: on every rank, when loss or gradient are not finite; names the step.
        """
        settings = self.job.settings
        plan = Plan(samples, settings.batch, seed=settings.seed, world_size=self.ranks.world_size)
        if self.ranks.first:
            emit("plan", steps=plan.steps, epochs=plan.epoch_at(plan.steps))
        records = []
        for step in range(1, plan.steps + 1):
            record = self._step(plan, step, samples)
            records.append(record)
            if self.ranks.first and (step % settings.log_every == 0 or step == plan.steps):
                emit("step", **record)
            if settings.save_steps and step % settings.save_steps == 0 and step < plan.steps:
                checkpoint.save(
                    self.engine.module, self.job.checkpoints, step=step, ranks=self.ranks
                )
        return records

    def _step(self, plan: Plan, step: int, samples: list[Sample]) -> dict[str, float]:
        begin = time.perf_counter()
        lr = self._set_lr(step, plan.steps)
        todo = plan.step(step, self.ranks.rank)
        # DeepSpeed divides by accumulation steps and averages over ranks; undo both and divide by
        # the tokens of the whole global batch instead.
        scale = len(todo.micro) * self.ranks.world_size / todo.supervised
        total = torch.zeros(1, dtype=torch.float64, device=self.ranks.device)
        for number, indices in enumerate(todo.micro, 1):
            batch = collate([samples[i] for i in indices], self.pad_id).to(self.ranks.device)
            with self._attention(batch.input_ids.shape[1]):
                loss = self.objective.loss_sum(self.engine, batch)
                self.engine.backward(loss * scale)
            total += loss.detach().double()
            if number == len(todo.micro):
                # Looked at before the optimizer moves anything: the weights stay good.
                mean = float(self.ranks.total(total)) / todo.supervised
                _require_finite("loss", mean, step, self.job)
            self.engine.step()
        grad_norm = float(self.engine.get_global_grad_norm() or 0.0)
        _require_finite("gradient norm", grad_norm, step, self.job)
        seconds = time.perf_counter() - begin
        return {
            "step": step,
            "loss": mean,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens_per_s": todo.tokens / seconds,
            "step_s": seconds,
            "epoch": plan.epoch_at(step),
        }

    def _attention(self, longest: int) -> contextlib.AbstractContextManager[None]:
        if self.ranks.device.type == "cpu" and longest <= SHORT_ROW:
            return sdpa_kernel(SDPBackend.MATH)
        return contextlib.nullcontext()

    def _set_lr(self, step: int, steps: int) -> float:
        optim = self.job.settings.optim
        warmup = warmup_steps(steps, optim.warmup_ratio)
        lr = optim.lr * factor(optim.scheduler, step=step, total=steps, warmup=warmup)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        return lr


def _require_finite(what: str, value: float, step: int, job: TrainJob) -> None:
    if math.isfinite(value):
        return
    good = checkpoint.last_good(job.checkpoints)
    raise TrainingError(
        f"{what} is {value} in step {step}; last good checkpoint: {good or 'none yet'}",
        hint=f"train.lr={job.settings.optim.lr / 10:g}, or look at the data of this step",
    )
