"""The update: passes over an iteration's replies, a minibatch an optimizer step, packed rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from tasks.rl.algorithms import correction
from tasks.rl.algorithms.batch import Estimated, Totals
from tasks.rl.algorithms.policy_loss import Given
from tasks.rl.algorithms.registry import Recipe
from tasks.rl.algorithms.value_loss import value_loss
from tasks.rl.experience.critic import Critic
from tasks.rl.experience.minibatches import Dealing, Minibatch
from tasks.rl.experience.packed_rows import Experience
from tasks.rl.learner import Learner
from tasks.rl.settings import Loop, Rollout
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.job import TrainJob
from tasks.training.model.packed_model import Asked, model_of
from tasks.training.objectives import Loss
from tasks.training.steps import begin_random, set_lr


@dataclass(frozen=True)
class Learned:
    """What an update goes by.

    Attributes:
        got: the replies, with everything that was measured of them.
        estimated: advantages, and returns where there is a critic.
        kl_coef: weight of the distance to the reference, this iteration's.
    """

    got: Experience
    estimated: Estimated
    kl_coef: float


Compare = Callable[[Experience], Mapping[str, float]]


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

    def measures(self, replies: int) -> bool:
        """Whether the update's own forward passes say the trainer's log-probabilities before it.

        They do where one step learns from all `replies` and nothing is dropped at random: a pass
        less over everything.
        """
        whole = self.loop.passes == 1 and replies == self.job.settings.batch.global_batch_size
        return whole and not self._drops

    @cached_property
    def _drops(self) -> bool:
        """Whether training computes something else than measuring does."""
        modules = self.engine.module.modules()
        said = model_of(self.engine.module).config.get_text_config().to_dict()
        return any(isinstance(one, nn.Dropout) and one.p > 0 for one in modules) or any(
            isinstance(value, float) and value > 0
            for name, value in said.items()
            if "drop" in name or "jitter" in name
        )

    def update(
        self, iteration: int, learned: Learned, compare: Compare, *, of: int
    ) -> dict[str, float]:
        """All steps of iteration 1, 2, ... `of`; returns the means of their measures.

        Args:
            iteration: its number.
            learned: what it goes by. Without log-probabilities of before the update they are
                measured on the way: see `measures`.
            compare: looks at them then, before a weight moves; what it returns is noted.
            of: how many iterations there are.

        Raises:
            TrainingError: on every rank, when a loss or a gradient is not finite; what `compare`
                raises.
        """
        optim, policy_rests = self.job.settings.optim, iteration <= self.loop.critic_warmup
        steps, critic = self.steps * of, self.critic
        found: dict[str, list[float]] = {}
        dealing = Dealing(self.job.settings, self.loop.passes, self.rollout.max_new_tokens)
        dealt = dealing.minibatches(iteration, learned.got, self.ranks)
        for number, minibatch in enumerate(dealt):
            step = (iteration - 1) * self.steps + number + 1
            begin_random(self.job.settings.seed, step=step, rank=self.ranks.rank)
            measures: dict[str, float] = {}
            if not policy_rests:
                lr = set_lr(self.engine, optim, step=step, steps=steps)
                measures |= {"lr": lr, **self._step_policy(step, minibatch, learned, compare)}
            if critic is not None:
                lr = set_lr(critic.engine, critic.optim, step=step, steps=steps)
                measures |= {"critic_lr": lr, **self._step_critic(critic, step, minibatch, learned)}
            for name, value in measures.items():
                found.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in found.items()}

    def _step_policy(
        self, step: int, minibatch: Minibatch, learned: Learned, compare: Compare
    ) -> dict[str, float]:
        asked = Asked(self.rollout.temperature, entropy=self.loop.entropy_coef != 0)
        policy_loss = self.recipe.policy_loss(self.loop, kl_coef=learned.kl_coef)
        got, old = learned.got, list[torch.Tensor]()
        noted: dict[str, float] = {}

        def loss_of(chosen: list[int]) -> Loss:
            said = self.engine(row=got.row(chosen).to(self.ranks.device), asked=asked)
            logprobs, entropy = said if asked.entropy else (said, None)
            old.append(logprobs.detach() if got.old is None else got.old[got.places(chosen)])
            given = self._given(learned, chosen, old[-1], entropy, minibatch.totals)
            return policy_loss(logprobs, given)

        def check() -> None:
            rows = [tuple(row) for row in minibatch.rows]
            noted.update(compare(got.with_measured(self.ranks, rows, {"old": old})))

        check_now = check if got.old is None else None
        found, norm = self._policy_learner.step(step, minibatch.rows, loss_of, check_now)
        return {**noted, **found, "grad_norm": norm}

    def _given(
        self, learned: Learned, chosen: Sequence[int], old: torch.Tensor,
        entropy: torch.Tensor | None, totals: Totals,
    ) -> Given:  # fmt: skip
        got, device, loop = learned.got, self.ranks.device, self.loop
        places, lengths = got.places(chosen), got.lengths[list(chosen)].to(device)
        old_n, sampled_n = old.float().to(device), got.sampled[places].to(device)
        bounds = {"high": loop.correction_high, "low": loop.correction_low}
        return Given(
            old_n=old_n,
            advantages_n=learned.estimated.advantages_N[places].to(device),
            weights_n=correction.weights(old_n, sampled_n, lengths, kind=loop.correction, **bounds),
            reference_n=None if got.reference is None else got.reference[places].to(device),
            entropy_n=entropy,
            owner_n=torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths),
            lengths_s=lengths,
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
