"""From replies to what the update goes by: everything that is measured, and what is made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tasks.core.errors import TrainingError
from tasks.rl.algorithms import correction, overlong
from tasks.rl.algorithms.batch import Batch
from tasks.rl.algorithms.registry import Recipe
from tasks.rl.experience.critic import Critic
from tasks.rl.experience.packed_rows import Experience, measured
from tasks.rl.experience.records import compared, estimates
from tasks.rl.experience.reference import Reference
from tasks.rl.settings import Online
from tasks.rl.update import Learned
from tasks.training.engine import checkpoint
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.job import TrainJob
from tasks.training.model.packed_model import Asked
from tasks.training.tokens.packing import Row


@dataclass(frozen=True)
class Appraiser:
    """Measures replies and estimates advantages.

    Attributes:
        engine: DeepSpeed's, around the policy.
        critic: None where the algorithm has none.
        reference: None where nothing asks for it.
        ranks: this process among its peers.
        job: what to do.
        online: sections `rl`, `rollout`, `reward`.
        recipe: the algorithm.
        usual: the mismatch that this run began with, and its limits.
    """

    engine: Any
    critic: Critic | None
    reference: Reference | None
    ranks: Ranks
    job: TrainJob
    online: Online
    recipe: Recipe
    usual: correction.Usual

    @property
    def asks_policy_alone(self) -> bool:
        """Whether nothing but the policy is measured, and nothing estimated of what it says."""
        return self.critic is None and self.reference is None

    def measured(self, got: Experience) -> Experience:
        """With the trainer's, the reference's and the critic's numbers of every token."""
        asked = Asked(self.online.rollout.temperature)
        size = self.job.settings.batch.micro_batch_size

        def of_policy(row: Row) -> dict[str, torch.Tensor]:
            found = {"old": self.engine(row=row, asked=asked)}
            if self.reference is not None:
                found["reference"] = self.reference(row, asked)
            return found

        self.engine.eval()
        how = {"size": size, "device": self.ranks.device}
        got = measured(got, self.ranks, measure=of_policy, **how)
        if self.critic is not None:
            with self.critic.active() as engine:
                engine.eval()
                got = measured(got, self.ranks, measure=lambda r: {"values": engine(r)}, **how)
                engine.train()
        self.engine.train()
        return got

    def estimate(
        self, got: Experience, kl_coef: float, iteration: int
    ) -> tuple[Learned, dict[str, float]]:
        """Advantages, and what is noted of them and of what was measured.

        Args:
            got: with everything that `measured` adds; or as it was collected, where the update
                measures (`Updater.measures`).
            kl_coef: weight of the distance to the reference, this iteration's.
            iteration: 1, 2, ...

        Raises:
            TrainingError: log-probabilities are not finite, the engine that answers is not the one
                that is trained, or the policy has left the reference.
        """
        loop, rollout = self.online.loop, self.online.rollout
        record = {} if got.old is None else self.compare(got, iteration)
        penalties = overlong.penalty(
            got.lengths,
            limit=rollout.max_new_tokens,
            buffer=loop.overlong_buffer,
            most=loop.overlong_penalty,
        )
        batch = Batch(
            lengths_S=got.lengths,
            groups_S=got.groups,
            scores_S=got.rewards + penalties,
            old_N=got.old,
            sampled_N=got.sampled,
            reference_N=got.reference,
            values_N=got.values,
            kl_coef=kl_coef,
        )
        estimated = self.recipe.advantages(batch, loop)
        learned = Learned(got, estimated, kl_coef)
        record |= estimates(got, estimated) | {"kl_coef": kl_coef}
        if "kl" in record:
            self._require_near(record["kl"], iteration)
        return learned, record

    def compare(self, got: Experience, iteration: int) -> dict[str, float]:
        """The trainer's log-probabilities beside the engine's; what is noted of them.

        Raises:
            TrainingError: as `estimate`.
        """
        assert got.old is not None
        differs = correction.mismatch(got.old, got.sampled)
        self.usual.require_within(differs, iteration)
        return compared(got.old, differs)

    def _require_near(self, kl_now: float, iteration: int) -> None:
        limit = self.online.loop.kl_limit
        if limit is not None and not kl_now <= limit:
            good = checkpoint.last_good(self.job.checkpoints)
            raise TrainingError(
                f"iteration {iteration}: the policy is {kl_now:.3g} nats a token from "
                f"the reference, more than rl.kl_limit={limit:g}; last good checkpoint: "
                f"{good or 'none yet'}",
                hint="rl.kl_coef=<more>, or a smaller train.lr",
            )
