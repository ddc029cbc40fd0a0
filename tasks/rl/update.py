"""The update: passes over an iteration's replies, a minibatch an optimizer step, packed rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from tasks.errors import TrainingError
from tasks.rl.algorithms import Recipe
from tasks.rl.batch import Estimated, Totals
from tasks.rl.critic import Critic
from tasks.rl.experience import Experience
from tasks.rl.policy_loss import Given
from tasks.rl.settings import Loop, Rollout
from tasks.rl.value_loss import value_loss
from tasks.training import checkpoint
from tasks.training.engine import Ranks
from tasks.training.job import TrainJob
from tasks.training.order import deal
from tasks.training.packed_model import Asked
from tasks.training.passes import Sums
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
        sums = Sums(self.ranks)
        for number, chosen in enumerate(minibatch.rows):
            if number:
                self.engine.step()  # of the row before: counts, and moves nothing
            row = learned.got.row(chosen).to(self.ranks.device)
            said = self.engine(row=row, asked=asked)
            logprobs, entropy = said if asked.entropy else (said, None)
            given = self._given(learned, chosen, entropy, minibatch.totals)
            loss = policy_loss(logprobs, given)
            self.engine.backward(loss.value * self._undo(minibatch))
            sums.add({"loss": loss.value, **loss.measures})
        found = self._finish(self.engine, sums, step, "the policy's")
        return {**found, "grad_norm": _norm(self.engine)}

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
        got, returns, device = learned.got, learned.estimated.returns_N, self.ranks.device
        assert got.values is not None
        assert returns is not None
        sums = Sums(self.ranks)
        with critic.active() as engine:
            for number, chosen in enumerate(minibatch.rows):
                if number:
                    engine.step()
                places = got.places(chosen)
                values = engine(got.row(chosen).to(device))
                old, wanted = got.values[places].to(device), returns[places].to(device)
                loss = value_loss(values, old, wanted, minibatch.totals, self.loop.value_clip)
                engine.backward(loss.value * self._undo(minibatch))
                sums.add({"value_total": loss.value, **loss.measures})
            found = self._finish(engine, sums, step, "the critic's")
            return {**found, "critic_grad_norm": _norm(engine)}

    def _undo(self, minibatch: Minibatch) -> int:
        """DeepSpeed divides by accumulation steps and averages over ranks; losses are parts of the
        whole minibatch's already.
        """
        return len(minibatch.rows) * self.ranks.world_size

    def _finish(self, engine: Any, sums: Sums, step: int, whose: str) -> dict[str, float]:
        found = sums.total()
        if all(math.isfinite(value) for value in found.values()):
            engine.step()
            if engine.was_step_applied() or self.job.settings.dtype == "float16":
                return found
        broken = sorted(name for name, value in found.items() if not math.isfinite(value))
        what = f"{broken[0]} is {found[broken[0]]}" if broken else "gradient is not finite"
        good = checkpoint.last_good(self.job.checkpoints)
        raise TrainingError(
            f"step {step}: {whose} {what}; last good checkpoint: {good or 'none yet'}",
            hint=f"train.lr={self.job.settings.optim.lr / 10:g}, or rl.kl_coef=<more>",
        )


def _norm(engine: Any) -> float:
    return float(engine.get_global_grad_norm() or 0.0)
