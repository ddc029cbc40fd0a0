"""The update: passes over an iteration's replies, a minibatch an optimizer step, packed rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from tasks.rl.algorithms import Recipe
from tasks.rl.batch import Estimated, Totals
from tasks.rl.critic import Critic
from tasks.rl.experience import Experience
from tasks.rl.learner import Learner
from tasks.rl.policy_loss import Given
from tasks.rl.settings import Loop, Rollout
from tasks.rl.value_loss import value_loss
from tasks.training.engine import Ranks
from tasks.training.job import TrainJob
from tasks.training.objectives import Loss
from tasks.training.order import deal
from tasks.training.packed_model import Asked
from tasks.training.steps import begin_random, set_lr


@dataclass(frozen=True)
class Learned:
    """What an update goes by.

    Attributes:
        got: the replies, with everything that was measured of them.
        estimated: advantages, and returns where there is a critic.
        weights: (N,) what the correction between trainer and engine makes of each token.
        kl_coef: weight of the distance to the reference, this iteration's.
    """

    got: Experience
    estimated: Estimated
    weights: torch.Tensor
    kl_coef: float


class Minibatch(NamedTuple):
    """One optimizer step's replies: this rank's rows of them, and what all of them add up to."""

    rows: list[list[int]]
    totals: Totals


@dataclass(frozen=True)
class Updater:
    """Takes the optimizer steps of policy and critic.

    Attributes:
        engine: DeepSpeed's, around the policy.
        critic: None where the algorithm has none.
        ranks: this process among its peers.
        job: what to do.
        loop: section `rl`.
        rollout: section `rollout`.
        recipe: the algorithm.
    """

    engine: Any
    critic: Critic | None
    ranks: Ranks
    job: TrainJob
    loop: Loop
    rollout: Rollout
    recipe: Recipe

    @property
    def steps(self) -> int:
        """Optimizer steps an iteration."""
        replies = self.loop.prompts * self.loop.samples
        return self.loop.passes * (replies // self.job.settings.batch.global_batch_size)

    @cached_property
    def _policy_learner(self) -> Learner:
        hint = f"train.lr={self.job.settings.optim.lr / 10:g}, or rl.kl_coef=<more>"
        return Learner(self.engine, self.ranks, self.job, whose="the policy's", hint=hint)

    @cached_property
    def _critic_learner(self) -> Learner:
        """To be asked for while the critic is active: its tensors ask for gradients then."""
        assert self.critic is not None
        hint = f"rl.critic_lr={self.critic.optim.lr / 10:g}"
        engine = self.critic.engine
        return Learner(engine, self.ranks, self.job, whose="the critic's", hint=hint)

    def update(self, iteration: int, learned: Learned, *, of: int) -> dict[str, float]:
        """All steps of iteration 1, 2, ... `of`; returns the means of their measures.

        Raises:
            TrainingError: on every rank, when a loss or a gradient is not finite.
        """
        optim, policy_rests = self.job.settings.optim, iteration <= self.loop.critic_warmup
        steps, critic = self.steps * of, self.critic
        found: dict[str, list[float]] = {}
        for number, minibatch in enumerate(self._minibatches(iteration, learned.got)):
            step = (iteration - 1) * self.steps + number + 1
            begin_random(self.job.settings.seed, step=step, rank=self.ranks.rank)
            measures: dict[str, float] = {}
            if not policy_rests:
                lr = set_lr(self.engine, optim, step=step, steps=steps)
                measures |= {"lr": lr, **self._step_policy(step, minibatch, learned)}
            if critic is not None:
                lr = set_lr(critic.engine, critic.optim, step=step, steps=steps)
                measures |= {"critic_lr": lr, **self._step_critic(critic, step, minibatch, learned)}
            for name, value in measures.items():
                found.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in found.items()}

    def _minibatches(self, iteration: int, got: Experience) -> Iterator[Minibatch]:
        size, settings = self.job.settings.batch.global_batch_size, self.job.settings
        lengths = got.examples.lengths.sum(axis=1)
        count = settings.batch.accumulation(self.ranks.world_size) * self.ranks.world_size
        for number in range(self.loop.passes):
            seeds = [settings.seed, iteration, number]
            order = np.random.default_rng(seeds).permutation(len(lengths))
            for start in range(0, len(order) - size + 1, size):
                chosen = order[start : start + size]
                rows = deal(lengths[chosen], count)[self.ranks.rank :: self.ranks.world_size]
                tokens = int(got.lengths[torch.from_numpy(chosen)].sum())
                totals = Totals(tokens, size, self.rollout.max_new_tokens)
                yield Minibatch([[int(chosen[i]) for i in row] for row in rows], totals)

    def _step_policy(self, step: int, minibatch: Minibatch, learned: Learned) -> dict[str, float]:
        asked = Asked(self.rollout.temperature, entropy=self.loop.entropy_coef != 0)
        policy_loss = self.recipe.policy_loss(self.loop, kl_coef=learned.kl_coef)

        def loss_of(chosen: list[int]) -> Loss:
            row = learned.got.row(chosen).to(self.ranks.device)
            said = self.engine(row=row, asked=asked)
            logprobs, entropy = said if asked.entropy else (said, None)
            return policy_loss(logprobs, self._given(learned, chosen, entropy, minibatch.totals))

        found, norm = self._policy_learner.step(step, minibatch.rows, loss_of)
        return {**found, "grad_norm": norm}

    def _given(
        self, learned: Learned, chosen: Sequence[int], entropy: torch.Tensor | None, totals: Totals
    ) -> Given:
        got, device = learned.got, self.ranks.device
        places = got.places(chosen)
        lengths = got.lengths[list(chosen)]
        assert got.old is not None
        return Given(
            old_n=got.old[places].to(device),
            advantages_n=learned.estimated.advantages_N[places].to(device),
            weights_n=learned.weights[places].to(device),
            reference_n=None if got.reference is None else got.reference[places].to(device),
            entropy_n=entropy,
            owner_n=torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device),
            lengths_s=lengths.to(device),
            totals=totals,
        )

    def _step_critic(
        self, critic: Critic, step: int, minibatch: Minibatch, learned: Learned
    ) -> dict[str, float]:
        got, before, returns = learned.got, learned.got.values, learned.estimated.returns_N
        assert before is not None
        assert returns is not None
        device = self.ranks.device

        with critic.active() as engine:

            def loss_of(chosen: list[int]) -> Loss:
                places = got.places(chosen)
                values = engine(got.row(chosen).to(device))
                old, wanted = before[places].to(device), returns[places].to(device)
                return value_loss(values, old, wanted, minibatch.totals, self.loop.value_clip)

            found, norm = self._critic_learner.step(step, minibatch.rows, loss_of)
        total = found.pop("loss")
        return {**found, "value_total": total, "critic_grad_norm": norm}
