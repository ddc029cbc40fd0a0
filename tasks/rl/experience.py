"""One iteration's responses with all that is measured on them: log-probs, values, advantages."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from tasks.core.errors import TrainingError
from tasks.rl import advantages
from tasks.rl.advantages import estimate_kl
from tasks.rl.models import Setup
from tasks.rl.responses import Response
from tasks.rl.rollout.proof import SyncProof
from tasks.training.engine import checkpoint
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.model.packed_model import TokenOutputs, evaluating
from tasks.training.tokens.examples import Examples
from tasks.training.tokens.rows import Row, deal, pack

_PER_RESPONSE = ("lengths", "groups", "rewards", "truncated")
_PER_TOKEN = ("sampled", "old", "reference", "values", "turn_rewards", "advantages", "returns")


@dataclass(frozen=True)
class Experience:
    """S responses with N sampled tokens in all, ordered by group; the same on every rank.

    Ragged data is flat: the tokens of all responses one after another. Observations of an
    environment are part of the sequences and of nothing else: N, `lengths` and every (N,) tensor
    skip them, so two tokens that follow each other there may have an observation between them.
    Log-probabilities are natural, in nats, at the sampling temperature.
    """

    lengths: torch.Tensor  # (S,) int64, sampled tokens per response, at least 1
    groups: torch.Tensor  # (S,) int64, number of the response's prompt within the iteration
    rewards: torch.Tensor  # (S,) float32
    truncated: torch.Tensor  # (S,) bool, True for responses that the length limit cut off
    sampled: torch.Tensor  # (N,) log-probabilities by the rollout engine
    # (N,) log-probabilities by the trainer, before the update; None if the update itself measures
    # them, see `Updater.measures`
    old: torch.Tensor | None = None
    # (N,) log-probabilities by the reference; None without one
    reference: torch.Tensor | None = None
    # (N,) values by the critic before the update; None without one
    values: torch.Tensor | None = None
    # (N,) float32, the part of `rewards` that an environment gave, at the last token of each turn;
    # None without one
    turn_rewards: torch.Tensor | None = None
    advantages: torch.Tensor | None = None  # (N,) once they are estimated
    returns: torch.Tensor | None = None  # (N,) the critic's targets; None without one
    kl_coef: float = 0.0  # weight of the KL to the reference in this iteration
    examples: Examples | None = None  # prompt and response as one sequence, sampled tokens marked

    def places(self, chosen: Sequence[int]) -> torch.Tensor:
        """Return the positions of these responses' tokens in (N,) arrays, one after another."""
        ends = self.lengths.cumsum(0)
        begins = ends - self.lengths
        return torch.cat([torch.arange(int(begins[i]), int(ends[i])) for i in chosen])

    def part(self, chosen: Sequence[int], device: torch.device | str = "cpu") -> Experience:
        """Return the tensors of these responses alone, on a device."""
        indices = [(name, list(chosen)) for name in _PER_RESPONSE]
        indices += [(name, self.places(chosen)) for name in _PER_TOKEN]
        tensors = {
            name: getattr(self, name)[index].to(device)
            for name, index in indices
            if getattr(self, name) is not None
        }
        return Experience(**tensors, kl_coef=self.kl_coef)

    def row(self, chosen: Sequence[int]) -> Row:
        """Return one packed row of the chosen prompts and responses."""
        assert self.examples is not None
        return pack(self.examples, chosen)

    @property
    def sequence_lengths(self) -> np.ndarray:
        """(S,) tokens of prompt and response."""
        assert self.examples is not None
        return self.examples.lengths.sum(axis=1)

    def rows(
        self, world_size: int, rank: int, size: int, *, padded: bool = False
    ) -> list[tuple[int, ...]]:
        """Return this rank's rows, as numbers of responses; every rank gets equally many."""
        lengths = self.sequence_lengths
        count = -(-len(lengths) // (size * world_size)) * world_size
        count = min(count, len(lengths) // world_size * world_size)
        return [tuple(row) for row in deal(lengths, count, padded=padded)[rank::world_size]]

    def with_measurements(
        self,
        ranks: Ranks,
        rows: Sequence[Sequence[int]],
        measurements: Mapping[str, list[torch.Tensor]],
    ) -> Experience:
        """Return a copy with per-token measurements of all ranks: `old`, `reference`, `values`."""
        mine = {
            name: [part.float().cpu().numpy() for part in parts]
            for name, parts in measurements.items()
        }
        all_ranks = ranks.all_objects((list(rows), mine))
        merged: dict[str, torch.Tensor] = {}
        for name in measurements:
            values = torch.full((int(self.lengths.sum()),), torch.nan)
            for chosen, parts in all_ranks:
                for row, part in zip(chosen, parts[name], strict=True):
                    values[self.places(row)] = torch.from_numpy(part)
            merged[name] = values
        return replace(self, **merged)


def pack_experience(responses: Sequence[Response]) -> Experience:
    """Lay the responses end to end. They are ordered by group."""
    generated = [response.generated for response in responses]
    turn_rewards = None
    if any(response.turns for response in responses):
        turn_rewards = torch.from_numpy(np.concatenate([r.turn_rewards for r in responses]))
    return Experience(
        lengths=torch.tensor([len(each.ids) for each in generated]),
        groups=torch.tensor([response.group for response in responses]),
        rewards=torch.tensor([response.reward for response in responses], dtype=torch.float32),
        truncated=torch.tensor([not each.ended for each in generated]),
        sampled=torch.from_numpy(np.concatenate([each.logprobs for each in generated])).float(),
        turn_rewards=turn_rewards,
        examples=Examples.of_texts(
            [response.ids for response in responses],
            np.concatenate([response.marks for response in responses]),
        ),
    )


LOG = logging.getLogger("plumbline.rl")
FIRST, GROWTH = 5, 4.0
"""Iterations whose median mismatch is usual, and how many times that is warned of."""


class Mismatch(NamedTuple):
    """Distance of the trainer's log-probabilities from the engine's, in nats per token."""

    mean_abs: float  # mean absolute difference
    max_abs: float  # largest absolute difference
    kl: float  # KL(engine || trainer), estimated by k3


def mismatch(old_N: torch.Tensor, sampled_N: torch.Tensor) -> Mismatch:
    """Return the distance between the trainer's and the engine's log-probabilities.

    Raises TrainingError if a value is not finite: every comparison of a limit with NaN is false.
    """
    for whose, logprobs_N in (("the trainer's", old_N), ("the rollout engine's", sampled_N)):
        if bad := int((~logprobs_N.isfinite()).sum()):
            raise TrainingError(
                f"{bad} of {logprobs_N.numel()} of {whose} log-probabilities of the response "
                "tokens are not finite",
                hint="the policy has diverged: lower train.lr, or raise rl.kl_coef",
            )
    old_N, sampled_N = old_N.double(), sampled_N.double()
    apart_N, kl_N = (old_N - sampled_N).abs(), estimate_kl(sampled_N, old_N, "k3")
    return Mismatch(float(apart_N.mean()), float(apart_N.max()), float(kl_N.mean()))


@dataclass(frozen=True)
class ExperienceScorer:
    """Measures responses and estimates advantages."""

    setup: Setup  # models and settings of the run
    # with `rl.staleness` the proof of the servers, which knows the mismatch of their version:
    # responses come from an older one, so their difference is not only mismatch
    proof: SyncProof | None = None
    usual: list[float] = field(default_factory=list)  # mismatch of `FIRST` iterations

    def measure(self, experience: Experience) -> Experience:
        """Add the log-probabilities by policy and reference and the critic's values, per token."""
        setup, outputs = self.setup, TokenOutputs(self.setup.rollout.temperature)
        measured = partial(
            measure_tokens, ranks=setup.ranks, padded=setup.padded,
            size=setup.job.settings.batch.micro_batch_size,
        )  # fmt: skip

        def of_policy(row: Row) -> dict[str, torch.Tensor]:
            logprobs = {"old": setup.engine(row=row, outputs=outputs)}
            if setup.has_reference:
                logprobs["reference"] = setup.reference_logprobs(row, outputs)
            return logprobs

        with evaluating(setup.engine):
            experience = measured(experience, measure=of_policy)
            if setup.critic is not None:
                with setup.critic.active() as engine, evaluating(engine):
                    experience = measured(experience, measure=lambda row: {"values": engine(row)})
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
            raise TrainingError(
                f"iteration {iteration}: the policy is {record['kl_k1']:.3g} nats per token from "
                f"the reference, more than rl.kl_limit={limit:g}; "
                f"{checkpoint.last_good_of(setup.job)}",
                hint="rl.kl_coef=<more>, or a smaller train.lr",
            )
        return experience, record

    def compare(self, experience: Experience, iteration: int) -> dict[str, float]:
        """Compare the trainer's log-probabilities with the rollout engine's; return metrics.

        `entropy` is an unbiased estimate if the responses were sampled from the policy. Raises
        TrainingError if a value is not finite, or the mismatch is above its limit.
        """
        assert experience.old is not None
        apart, name = mismatch(experience.old, experience.sampled), "mismatch"
        checked, limit = apart.mean_abs, self.setup.loop.mismatch_limit
        if self.proof is not None:
            checked, name = self.proof.mismatch, "off_policy"
        if not checked <= limit:
            raise TrainingError(
                f"iteration {iteration}: trainer and engine differ by {checked:.3g} nats per token "
                f"(mean absolute log-prob difference), more than rl.mismatch_limit={limit:g}: what "
                "is sampled is not what is trained",
                hint="rl.mismatch_limit=<more> accepts the difference",
            )
        if has_grown(self.usual, checked, limit) and self.setup.ranks.first:
            LOG.warning(
                "iteration %d: trainer and engine differ by %.3g nats per token, far more than "
                "before: it grows with length and entropy, or the engine has old weights",
                iteration, checked,
            )  # fmt: skip
        return {
            "mismatch/mean_abs": checked,
            **{f"{name}/{key}": value for key, value in apart._asdict().items()},
            "entropy": float(-experience.old.mean()),
        }


def has_grown(usual: list[float], mean_abs: float, limit: float) -> bool:
    """Return True for a mismatch far above the usual one, which then is of the next iterations.

    `limit` is the absolute limit: mismatch below a tenth of it is noise of the kernels.
    """
    if usual and mean_abs > max(GROWTH * statistics.median(usual), limit / 10):
        usual.clear()
        return True
    if len(usual) < FIRST:
        usual.append(mean_abs)
    return False


def measure_tokens(
    experience: Experience,
    ranks: Ranks,
    *,
    size: int,
    padded: bool = False,
    measure: Callable[[Row], Mapping[str, torch.Tensor]],
) -> Experience:
    """Measure every token, each rank its own rows of `size` responses.

    `measure` returns (tokens of the row,) tensors by name.
    """
    rows = experience.rows(ranks.world_size, ranks.rank, size, padded=padded)
    measured = [measure(experience.row(chosen).to(ranks.device)) for chosen in rows]
    by_name = {name: [of_row[name] for of_row in measured] for name in measured[0]}
    return experience.with_measurements(ranks, rows, by_name)


def estimates(experience: Experience) -> dict[str, float]:
    """Return metrics of advantages and values.

    `advantage_std`; with a reference the KL to it in nats per token: `kl` by k3, clamped, and
    `kl_k1` by k1, which `rl.kl_limit` and an adaptive `rl.kl_coef` go by; `explained_variance` if
    there is a critic.
    """
    assert experience.advantages is not None
    metrics = {"advantage_std": float(experience.advantages.std(correction=0))}
    if experience.reference is not None:
        assert experience.old is not None
        old, reference = experience.old.double(), experience.reference.double()
        metrics["kl"] = float(estimate_kl(old, reference, "k3").mean())
        metrics["kl_k1"] = float((old - reference).mean())
    if experience.values is not None and experience.returns is not None:
        returns = experience.returns.double()
        variance = returns.var(correction=0)
        unexplained = (returns - experience.values.double()).var(correction=0)
        metrics["explained_variance"] = float(1 - unexplained / variance) if variance else 0.0
    return metrics
