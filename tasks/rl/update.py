"""Optimizer steps on one iteration's responses: minibatches, ranks, packed rows, losses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tasks.core.errors import TrainingError
from tasks.rl.experience import Experience, ExperienceScorer
from tasks.rl.losses import Totals, policy_loss, value_loss
from tasks.rl.models import Setup
from tasks.training.engine import checkpoint
from tasks.training.loop import MAX_SKIPPED, accumulate, begin_random, set_lr, take
from tasks.training.losses import Loss
from tasks.training.model.packed_model import TokenOutputs
from tasks.training.tokens.rows import deal

Rows = list[list[int]]
"""Numbers of the responses in each row."""


def minibatches(
    setup: Setup, iteration: int, experience: Experience
) -> Iterator[tuple[Rows, Totals]]:
    """Yield this rank's rows of every minibatch of all epochs, each epoch in an order of its own.

    The rest of an epoch that fills no minibatch is left out. Totals are over all rows and ranks.
    """
    settings, ranks = setup.job.settings, setup.ranks
    size = settings.batch.global_batch_size
    lengths = experience.sequence_lengths
    count = settings.batch.accumulation(ranks.world_size) * ranks.world_size
    for epoch in range(setup.loop.ppo_epochs):
        order = np.random.default_rng([settings.seed, iteration, epoch])
        places = order.permutation(len(lengths))
        for start in range(0, len(places) - size + 1, size):
            chosen = places[start : start + size]
            rows = deal(lengths[chosen], count, padded=setup.padded)[ranks.rank :: ranks.world_size]
            counted = torch.from_numpy(chosen)
            if setup.loop.mask_truncated:
                counted = counted[~experience.truncated[counted]]
            tokens = max(1, int(experience.lengths[counted].sum()))  # 0: all are masked
            totals = Totals(tokens, max(1, len(counted)), setup.rollout.max_new_tokens)
            yield [[int(chosen[i]) for i in row] for row in rows], totals


class Updater:
    """Takes the optimizer steps of policy and critic.

    The scorer compares trainer and engine before a weight moves, if only the update measures.
    """

    def __init__(self, setup: Setup, scorer: ExperienceScorer) -> None:
        self.setup, self._scorer = setup, scorer
        self._skipped = Counter[str]()  # fp16 steps in a row that overflowed

    def measures(self, responses: int) -> bool:
        """Return True if the update's own forward passes measure the old log-probabilities.

        They do if a single step trains on all `responses`: this saves one forward pass over
        everything.
        """
        size = self.setup.job.settings.batch.global_batch_size
        return self.setup.loop.ppo_epochs == 1 and responses == size

    def update(self, iteration: int, experience: Experience, *, of: int) -> dict[str, float]:
        """Take all steps of iteration 1, 2, ... `of`; return the means of their metrics.

        Without old log-probabilities in the experience the update measures them, see `measures`.
        Raises TrainingError on every rank if a loss or gradient is not finite, or the mismatch is
        above its limit.
        """
        setup, loop = self.setup, self.setup.loop
        settings, critic = setup.job.settings, setup.critic
        responses = loop.rollout_batch_size * loop.num_generations
        each = loop.ppo_epochs * (responses // settings.batch.global_batch_size)
        # The policy's schedule counts its own steps: its warm-up follows the critic's.
        steps, before = each * of, loop.critic_warmup * each
        warming = iteration <= loop.critic_warmup
        # From its zero head the clip would keep the critic below the scale of rewards.
        clip = None if warming else loop.value_clip
        history: dict[str, list[float]] = {}
        batches = enumerate(minibatches(setup, iteration, experience), (iteration - 1) * each + 1)
        for step, (rows, totals) in batches:
            begin_random(settings.seed, step=step, rank=setup.ranks.rank)
            metrics: dict[str, float] = {}
            if not warming:
                lr = set_lr(setup.engine, settings.optim, step=step - before, steps=steps - before)
                learned = self._step_policy(iteration, step, experience, rows, totals)
                metrics |= {"lr": lr, **learned}
            if critic is not None:
                lr = set_lr(critic.engine, critic.optim, step=step, steps=steps)
                learned = self._step_critic(step, experience, rows, totals, clip)
                metrics |= {"critic_lr": lr, **learned}
            for name, value in metrics.items():
                history.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in history.items()}

    def _step_policy(
        self, iteration: int, step: int, experience: Experience, rows: Rows, totals: Totals
    ) -> dict[str, float]:
        setup, loop, device = self.setup, self.setup.loop, self.setup.ranks.device
        outputs = TokenOutputs(setup.rollout.temperature, entropy=loop.entropy_coef != 0)
        measured: list[torch.Tensor] = []

        def loss_of(chosen: list[int]) -> Loss:
            output = setup.engine(row=experience.row(chosen).to(device), outputs=outputs)
            logprobs, entropy = output if outputs.entropy else (output, None)
            row = experience.part(chosen, device)
            if row.old is None:
                measured.append(logprobs.detach())
                row = replace(row, old=measured[-1].float())
            return policy_loss(logprobs, row, totals, setup.algorithm, loop, entropy)

        metrics = self._accumulate("policy", setup.engine, step, rows, loss_of)
        comparison: dict[str, float] = {}
        if experience.old is None:
            experience = experience.with_measurements(setup.ranks, rows, {"old": measured})
            comparison = self._scorer.compare(experience, iteration)
        return {**metrics, **self._take("policy", setup.engine, step), **comparison}

    def _step_critic(
        self, step: int, experience: Experience, rows: Rows, totals: Totals, clip: float | None
    ) -> dict[str, float]:
        critic, device = self.setup.critic, self.setup.ranks.device
        assert critic is not None
        with critic.active() as engine:

            def loss_of(chosen: list[int]) -> Loss:
                values = engine(experience.row(chosen).to(device))
                return value_loss(values, experience.part(chosen, device), totals, clip)

            metrics = self._accumulate("critic", engine, step, rows, loss_of)
            taken = self._take("critic", engine, step)
        metrics["value_total"] = metrics.pop("loss")
        return metrics | {f"critic_{name}": value for name, value in taken.items()}

    def _accumulate(
        self, whose: str, engine: Any, step: int, rows: Rows, loss_of: Callable[[list[int]], Loss]
    ) -> dict[str, float]:
        """Run this rank's forward and backward passes; return means over minibatch and ranks."""
        metrics, _ = accumulate(engine, self.setup.ranks, rows, loss_of)
        for name, value in sorted(metrics.items()):
            if not math.isfinite(value):
                raise self._error(whose, step, f"{name} is {value}")
        return metrics

    def _take(self, whose: str, engine: Any, step: int) -> dict[str, float]:
        """Take an optimizer step; return `grad_norm`, or in fp16 `skipped` if it overflowed."""
        half = self.setup.job.settings.dtype == "float16"
        norm, skipped = take(engine, half=half)
        if math.isnan(norm) and not skipped:
            raise self._error(whose, step, "gradient is not finite")
        self._skipped[whose] = self._skipped[whose] + 1 if skipped else 0
        if self._skipped[whose] >= MAX_SKIPPED:
            raise self._error(whose, step, f"fp16 overflowed in the last {MAX_SKIPPED} steps")
        metrics = {"skipped": float(skipped)} if half else {}
        return metrics if skipped else {**metrics, "grad_norm": norm}

    def _error(self, whose: str, step: int, what: str) -> TrainingError:
        job, loop = self.setup.job, self.setup.loop
        hint = f"train.lr={job.settings.optim.lr / 10:g}, or rl.kl_coef=<more>"
        if whose == "critic":
            hint = f"rl.critic_lr={(loop.critic_lr or job.settings.optim.lr) / 10:g}"
        return TrainingError(
            f"step {step}: the {whose}'s {what}; {checkpoint.last_good_of(job)}", hint=hint
        )
