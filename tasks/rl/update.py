"""Optimizer steps on one iteration's responses: minibatches, ranks, packed rows, losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from tasks.rl.algorithms import correction
from tasks.rl.algorithms.batch import Advantages, Totals
from tasks.rl.algorithms.policy_loss import LossInputs
from tasks.rl.algorithms.value_loss import value_loss
from tasks.rl.experience.critic import Critic
from tasks.rl.experience.packed_rows import Experience
from tasks.rl.learner import Learner
from tasks.rl.setup import Setup
from tasks.training.losses import Loss
from tasks.training.model.packed_model import TokenOutputs
from tasks.training.steps import begin_random, set_lr
from tasks.training.tokens.order import deal


class Minibatch(NamedTuple):
    """This rank's rows of one optimizer step, and the totals over all rows and ranks."""

    rows: list[list[int]]
    totals: Totals


def minibatches(setup: Setup, iteration: int, experience: Experience) -> Iterator[Minibatch]:
    """Yield this rank's minibatches of all epochs, each epoch in an order of its own.

    Rows have about equally many tokens. The rest of an epoch that fills no minibatch is left out.
    """
    settings, ranks = setup.job.settings, setup.ranks
    size = settings.batch.global_batch_size
    lengths = experience.examples.lengths.sum(axis=1)
    count = settings.batch.accumulation(ranks.world_size) * ranks.world_size
    for epoch in range(setup.loop.ppo_epochs):
        order = np.random.default_rng([settings.seed, iteration, epoch])
        places = order.permutation(len(lengths))
        for start in range(0, len(places) - size + 1, size):
            chosen = places[start : start + size]
            rows = deal(lengths[chosen], count)[ranks.rank :: ranks.world_size]
            counted = torch.from_numpy(chosen)
            if setup.loop.mask_truncated:
                counted = counted[~experience.truncated[counted]]
            tokens = max(1, int(experience.lengths[counted].sum()))  # 0: all are masked
            totals = Totals(tokens, max(1, len(counted)), setup.rollout.max_new_tokens)
            yield Minibatch([[int(chosen[i]) for i in row] for row in rows], totals)


@dataclass(frozen=True)
class UpdateInputs:
    """Responses and advantages of one iteration.

    Attributes:
        experience: the responses and what was measured on them.
        advantages: advantages, and returns if there is a critic.
        kl_coef: weight of the KL to the reference in this iteration.
    """

    experience: Experience
    advantages: Advantages
    kl_coef: float


Compare = Callable[[Experience], Mapping[str, float]]
"""Compares trainer and engine log-probabilities; returns metrics or raises TrainingError."""


@dataclass(frozen=True)
class Updater:
    """Takes the optimizer steps of policy and critic.

    Attributes:
        setup: models and settings of the run.
    """

    setup: Setup

    @property
    def steps(self) -> int:
        """Optimizer steps per iteration."""
        loop, batch = self.setup.loop, self.setup.job.settings.batch
        responses = loop.rollout_batch_size * loop.num_generations
        return loop.ppo_epochs * (responses // batch.global_batch_size)

    @cached_property
    def _policy_learner(self) -> Learner:
        setup = self.setup
        hint = f"train.lr={setup.job.settings.optim.lr / 10:g}, or rl.kl_coef=<more>"
        return Learner(setup.engine, setup.ranks, setup.job, whose="the policy's", hint=hint)

    @cached_property
    def _critic_learner(self) -> Learner:
        """The critic's learner. First used while the critic is active, so its gradients are on."""
        setup, critic = self.setup, self.setup.critic
        assert critic is not None
        hint = f"rl.critic_lr={critic.optim.lr / 10:g}"
        return Learner(critic.engine, setup.ranks, setup.job, whose="the critic's", hint=hint)

    def measures(self, responses: int) -> bool:
        """Return True if the update's own forward passes measure the old log-probabilities.

        They do if a single step trains on all `responses`: this saves one forward pass over
        everything.
        """
        size = self.setup.job.settings.batch.global_batch_size
        return self.setup.loop.ppo_epochs == 1 and responses == size

    def update(
        self, iteration: int, inputs: UpdateInputs, compare: Compare, *, of: int
    ) -> dict[str, float]:
        """Take all steps of iteration 1, 2, ... `of`; return the means of their metrics.

        Args:
            iteration: its number.
            inputs: responses and advantages. Without old log-probabilities the update measures
                them, see `measures`.
            compare: called with those before a weight moves; its result joins the metrics.
            of: total number of iterations.

        Raises:
            TrainingError: on every rank, if a loss or gradient is not finite, or from `compare`.
        """
        setup, steps = self.setup, self.steps * of
        settings, critic = setup.job.settings, setup.critic
        history: dict[str, list[float]] = {}
        first = (iteration - 1) * self.steps + 1
        # The policy's schedule counts its own steps: its warm-up follows the critic's.
        before = setup.loop.critic_warmup * self.steps
        warming = iteration <= setup.loop.critic_warmup
        # From its zero head the clip would keep the critic below the scale of rewards.
        clip = None if warming else setup.loop.value_clip
        for step, minibatch in enumerate(minibatches(setup, iteration, inputs.experience), first):
            begin_random(settings.seed, step=step, rank=setup.ranks.rank)
            metrics: dict[str, float] = {}
            if not warming:
                lr = set_lr(setup.engine, settings.optim, step=step - before, steps=steps - before)
                metrics |= {"lr": lr, **self._step_policy(step, minibatch, inputs, compare)}
            if critic is not None:
                lr = set_lr(critic.engine, critic.optim, step=step, steps=steps)
                learned = self._step_critic(critic, step, minibatch, inputs, clip)
                metrics |= {"critic_lr": lr, **learned}
            for name, value in metrics.items():
                history.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in history.items()}

    def _step_policy(
        self, step: int, minibatch: Minibatch, inputs: UpdateInputs, compare: Compare
    ) -> dict[str, float]:
        setup, loop = self.setup, self.setup.loop
        outputs = TokenOutputs(setup.rollout.temperature, entropy=loop.entropy_coef != 0)
        policy_loss = setup.recipe.policy_loss(loop, kl_coef=inputs.kl_coef)
        experience, old = inputs.experience, list[torch.Tensor]()
        comparison: dict[str, float] = {}

        def loss_of(chosen: list[int]) -> Loss:
            row = experience.row(chosen).to(setup.ranks.device)
            output = setup.engine(row=row, outputs=outputs)
            logprobs, entropy = output if outputs.entropy else (output, None)
            stored = experience.old
            old.append(logprobs.detach() if stored is None else stored[experience.places(chosen)])
            loss_inputs = self._loss_inputs(inputs, chosen, old[-1], entropy, minibatch.totals)
            return policy_loss(logprobs, loss_inputs)

        def check() -> None:
            rows = [tuple(row) for row in minibatch.rows]
            comparison.update(
                compare(experience.with_measurements(setup.ranks, rows, {"old": old}))
            )

        check_now = check if experience.old is None else None
        return {
            **self._policy_learner.step(step, minibatch.rows, loss_of, check_now), **comparison
        }  # fmt: skip

    def _loss_inputs(
        self, inputs: UpdateInputs, chosen: Sequence[int], old: torch.Tensor,
        entropy: torch.Tensor | None, totals: Totals,
    ) -> LossInputs:  # fmt: skip
        experience, device, loop = inputs.experience, self.setup.ranks.device, self.setup.loop
        places, lengths = experience.places(chosen), experience.lengths[list(chosen)].to(device)
        old_n, sampled_n = old.float().to(device), experience.sampled[places].to(device)
        owner_n = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
        bounds = {"high": loop.correction_high, "low": loop.correction_low}
        reference, kept_n = experience.reference, torch.ones_like(old_n)
        if loop.mask_truncated:
            kept_n = (~experience.truncated[list(chosen)]).float().to(device)[owner_n]
        return LossInputs(
            old_n=old_n,
            advantages_n=inputs.advantages.advantages_N[places].to(device),
            weights_n=correction.weights(old_n, sampled_n, lengths, kind=loop.correction, **bounds),
            reference_n=None if reference is None else reference[places].to(device),
            entropy_n=entropy,
            owner_n=owner_n,
            lengths_s=lengths,
            totals=totals,
            kept_n=kept_n,
        )

    def _step_critic(
        self,
        critic: Critic,
        step: int,
        minibatch: Minibatch,
        inputs: UpdateInputs,
        clip: float | None,
    ) -> dict[str, float]:
        experience, returns = inputs.experience, inputs.advantages.returns_N
        before = experience.values
        assert before is not None
        assert returns is not None
        device = self.setup.ranks.device

        with critic.active() as engine:

            def loss_of(chosen: list[int]) -> Loss:
                places = experience.places(chosen)
                values = engine(experience.row(chosen).to(device))
                old, target = before[places].to(device), returns[places].to(device)
                return value_loss(values, old, target, minibatch.totals, clip)

            metrics = self._critic_learner.step(step, minibatch.rows, loss_of)
        names = {
            "loss": "value_total",
            "grad_norm": "critic_grad_norm",
            "skipped": "critic_skipped",
        }
        return {names.get(name, name): value for name, value in metrics.items()}
