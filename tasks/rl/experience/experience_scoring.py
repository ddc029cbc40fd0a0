"""Measure responses (log-probabilities, values, KL) and estimate their advantages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tasks.core.errors import TrainingError
from tasks.rl.algorithms import correction
from tasks.rl.algorithms.batch import Batch
from tasks.rl.experience.packed_rows import Experience, measure_tokens
from tasks.rl.experience.records import compared, estimates, off_policy
from tasks.rl.setup import Setup
from tasks.rl.update import UpdateInputs
from tasks.training.engine import checkpoint
from tasks.training.model.packed_model import TokenOutputs
from tasks.training.tokens.packing import Row

LOG = logging.getLogger("plumbline.rl")


@dataclass(frozen=True)
class ExperienceScorer:
    """Measures responses and estimates advantages.

    Attributes:
        setup: models and settings of the run.
        mismatch_limits: limits of the train-inference mismatch.
        probed: returns the mismatch of the engine's current version, in nats per token. Needed if
            responses come from an older version, since their difference is not only mismatch.
    """

    setup: Setup
    mismatch_limits: correction.MismatchLimits
    probed: Callable[[], float] | None = None

    @property
    def needs_policy_only(self) -> bool:
        """True if neither critic nor reference is measured."""
        return self.setup.critic is None and self.setup.reference is None

    def measure(self, experience: Experience) -> Experience:
        """Add the log-probabilities by policy and reference and the critic's values, per token."""
        outputs = TokenOutputs(self.setup.rollout.temperature)
        size = self.setup.job.settings.batch.micro_batch_size

        def of_policy(row: Row) -> dict[str, torch.Tensor]:
            logprobs = {"old": self.setup.engine(row=row, outputs=outputs)}
            if self.setup.reference is not None:
                logprobs["reference"] = self.setup.reference(row, outputs)
            return logprobs

        self.setup.engine.eval()
        placing = {"size": size, "device": self.setup.ranks.device}
        experience = measure_tokens(experience, self.setup.ranks, measure=of_policy, **placing)
        if self.setup.critic is not None:
            with self.setup.critic.active() as engine:
                engine.eval()
                experience = measure_tokens(
                    experience, self.setup.ranks, measure=lambda r: {"values": engine(r)}, **placing
                )
                engine.train()
        self.setup.engine.train()
        return experience

    def estimate(
        self, experience: Experience, kl_coef: float, iteration: int
    ) -> tuple[UpdateInputs, dict[str, float]]:
        """Return advantages, and metrics of them and of the measurements.

        Args:
            experience: the responses with the results of `measure`; without them if the update
                measures (`Updater.measures`).
            kl_coef: weight of the KL to the reference in this iteration.
            iteration: 1, 2, ...

        Raises:
            TrainingError: a log-probability is not finite, the train-inference mismatch is above
                its limit, or the policy is too far from the reference.
        """
        loop = self.setup.loop
        record = {} if experience.old is None else self.compare(experience, iteration)
        batch = Batch(
            lengths_S=experience.lengths,
            groups_S=experience.groups,
            scores_S=experience.rewards,
            old_N=experience.old,
            sampled_N=experience.sampled,
            reference_N=experience.reference,
            values_N=experience.values,
            kl_coef=kl_coef,
            turns_N=experience.turn_rewards,
        )
        estimated = self.setup.recipe.advantages(batch, loop)
        inputs = UpdateInputs(experience, estimated, kl_coef)
        record |= estimates(experience, estimated) | {"kl_coef": kl_coef}
        if "kl_k1" in record:
            self._require_near(record["kl_k1"], iteration)
        return inputs, record

    def compare(self, experience: Experience, iteration: int) -> dict[str, float]:
        """Compare the trainer's log-probabilities with the rollout engine's; return metrics.

        Raises:
            TrainingError: as `estimate`.
        """
        assert experience.old is not None
        measured = correction.mismatch(experience.old, experience.sampled)
        mismatch = measured.mean_abs if self.probed is None else self.probed()
        checked = replace(measured, mean_abs=mismatch)
        warning = self.mismatch_limits.require_within(checked, iteration)
        if warning and self.setup.ranks.first:
            LOG.warning(warning)
        if self.probed is None:
            return compared(experience.old, measured)
        return off_policy(experience, measured, mismatch)

    def _require_near(self, kl_now: float, iteration: int) -> None:
        limit = self.setup.loop.kl_limit
        if limit is not None and not kl_now <= limit:
            good = checkpoint.last_good(self.setup.job.checkpoints)
            raise TrainingError(
                f"iteration {iteration}: the policy is {kl_now:.3g} nats per token from "
                f"the reference, more than rl.kl_limit={limit:g}; last good checkpoint: "
                f"{good or 'none yet'}",
                hint="rl.kl_coef=<more>, or a smaller train.lr",
            )
