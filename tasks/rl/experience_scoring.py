"""Measure responses (log-probabilities, values, KL) and estimate their advantages."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from tasks.core.errors import TrainingError
from tasks.rl import advantages, correction
from tasks.rl.experience import Experience, measure_tokens
from tasks.rl.metrics import compared, estimates
from tasks.rl.rollout.servers import ServerEngine
from tasks.rl.setup import Setup
from tasks.training.engine import checkpoint
from tasks.training.model.packed_model import TokenOutputs
from tasks.training.tokens.packing import Row

LOG = logging.getLogger("plumbline.rl")


@dataclass(frozen=True)
class ExperienceScorer:
    """Measures responses and estimates advantages."""

    setup: Setup  # models and settings of the run
    mismatch_limits: correction.MismatchLimits  # limits of the train-inference mismatch
    # with `rl.staleness` the servers, which know the mismatch of their version: responses come from
    # an older one, so their difference is not only mismatch
    servers: ServerEngine | None = None

    def measure(self, experience: Experience) -> Experience:
        """Add the log-probabilities by policy and reference and the critic's values, per token."""
        outputs = TokenOutputs(self.setup.rollout.temperature)
        size = self.setup.job.settings.batch.micro_batch_size

        def of_policy(row: Row) -> dict[str, torch.Tensor]:
            logprobs = {"old": self.setup.engine(row=row, outputs=outputs)}
            if self.setup.has_reference:
                logprobs["reference"] = self.setup.reference_logprobs(row, outputs)
            return logprobs

        ranks = self.setup.ranks
        self.setup.engine.eval()
        experience = measure_tokens(experience, ranks, size=size, measure=of_policy)
        if self.setup.critic is not None:
            with self.setup.critic.active() as engine:
                engine.eval()
                experience = measure_tokens(
                    experience, ranks, size=size, measure=lambda row: {"values": engine(row)}
                )
                engine.train()
        self.setup.engine.train()
        return experience

    def estimate(
        self, experience: Experience, kl_coef: float, iteration: int
    ) -> tuple[Experience, dict[str, float]]:
        """Add advantages and returns; return metrics of them and of the measurements, too.

        The experience has no measurements if the update measures (`Updater.measures`). Raises
        TrainingError as `compare`, or if the policy is too far from the reference.
        """
        record = {} if experience.old is None else self.compare(experience, iteration)
        experience, setup = replace(experience, kl_coef=kl_coef), self.setup
        advantages_N, returns_N = advantages.estimate(
            setup.algorithm.estimate, experience, setup.loop
        )
        experience = replace(experience, advantages=advantages_N, returns=returns_N)
        record |= estimates(experience) | {"kl_coef": kl_coef}
        limit = setup.loop.kl_limit
        if limit is not None and not record["kl_k1"] <= limit:
            good = checkpoint.last_good(setup.job.checkpoints)
            raise TrainingError(
                f"iteration {iteration}: the policy is {record['kl_k1']:.3g} nats per token from "
                f"the reference, more than rl.kl_limit={limit:g}; last good checkpoint: "
                f"{good or 'none yet'}",
                hint="rl.kl_coef=<more>, or a smaller train.lr",
            )
        return experience, record

    def compare(self, experience: Experience, iteration: int) -> dict[str, float]:
        """Compare the trainer's log-probabilities with the rollout engine's; return metrics.

        Raises TrainingError if one is not finite, or the mismatch is above its limit.
        """
        assert experience.old is not None
        measured = correction.mismatch(experience.old, experience.sampled)
        mismatch = None if self.servers is None else self.servers.mismatch
        checked = measured.mean_abs if mismatch is None else mismatch
        warning = self.mismatch_limits.require_within(checked, iteration)
        if warning and self.setup.ranks.first:
            LOG.warning(warning)
        return compared(experience.old, measured, mismatch)
