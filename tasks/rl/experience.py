"""One iteration's responses with all that is measured on them, and the packed rows to train on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tasks.rl.responses import Response
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.tokens.examples import Examples
from tasks.training.tokens.order import deal
from tasks.training.tokens.packing import Row, pack

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
