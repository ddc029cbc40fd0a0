"""One iteration's responses on every rank, and the packed rows that they are laid into."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tasks.rl.experience.responses import Prompt, ScoredResponse
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.tokens.examples import Examples
from tasks.training.tokens.order import deal
from tasks.training.tokens.packing import Row, pack

_UNSENT = Prompt({}, np.zeros(0, np.int32))


@dataclass(frozen=True)
class Experience:
    """S responses with N sampled tokens in all, ordered by group; the same on every rank.

    Observations of an environment are part of the sequences and of nothing else: N, `lengths` and
    every (N,) tensor skip them, so two tokens that follow each other there may have an observation
    between them.

    Attributes:
        scored: the responses and their rewards.
        examples: prompt and response as one sequence, sampled tokens marked.
        lengths: (S,) int64, sampled tokens per response.
        groups: (S,) int64, number of the response's prompt within the iteration.
        rewards: (S,) float32, minus the penalty for length.
        sampled: (N,) log-probabilities by the rollout engine.
        old: (N,) log-probabilities by the trainer, before the update.
        reference: (N,) log-probabilities by the reference; None without one.
        values: (N,) values by the critic; None without one.
        turn_rewards: (N,) float32, the part of `rewards` that an environment gave, at the last
            token of each turn; None without one.
    """

    scored: tuple[ScoredResponse, ...]
    examples: Examples
    lengths: torch.Tensor
    groups: torch.Tensor
    rewards: torch.Tensor
    sampled: torch.Tensor
    old: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    values: torch.Tensor | None = None
    turn_rewards: torch.Tensor | None = None

    @property
    def truncated(self) -> torch.Tensor:
        """(S,) bool, True for responses that the length limit cut off."""
        return torch.tensor([not scored.response.generated.ended for scored in self.scored])

    @property
    def owner(self) -> torch.Tensor:
        """(N,) number of the response that each token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)

    def places(self, chosen: Sequence[int]) -> torch.Tensor:
        """Return the positions of these responses' tokens in (N,) arrays, one after another."""
        ends = self.lengths.cumsum(0)
        begins = ends - self.lengths
        return torch.cat([torch.arange(int(begins[i]), int(ends[i])) for i in chosen])

    def row(self, chosen: Sequence[int]) -> Row:
        """Return one packed row of the chosen prompts and responses."""
        return pack(self.examples, chosen)

    def rows(self, world_size: int, rank: int, size: int) -> list[tuple[int, ...]]:
        """Return this rank's rows, as numbers of responses; every rank gets equally many."""
        lengths = self.examples.lengths.sum(axis=1)
        count = -(-len(lengths) // (size * world_size)) * world_size
        count = min(count, len(lengths) // world_size * world_size)
        return [tuple(row) for row in deal(lengths, count)[rank::world_size]]

    def with_measurements(
        self,
        ranks: Ranks,
        rows: Sequence[tuple[int, ...]],
        measurements: Mapping[str, list[torch.Tensor]],
    ) -> Experience:
        """Return a copy with per-token measurements added: `old`, `reference` or `values`."""
        mine = {
            name: [part.cpu().numpy() for part in parts] for name, parts in measurements.items()
        }
        all_ranks = ranks.all_objects((list(rows), mine))
        merged: dict[str, torch.Tensor] = {}
        for name in measurements:
            values = torch.full((int(self.lengths.sum()),), torch.nan)
            for chosen, parts in all_ranks:
                for row, part in zip(chosen, parts[name], strict=True):
                    values[self.places(row)] = torch.from_numpy(part).float()
            merged[name] = values
        return replace(self, **merged)


def gather_responses(
    ranks: Ranks, mine: Sequence[tuple[int, ScoredResponse]], prompts: Sequence[Prompt]
) -> list[tuple[int, ScoredResponse]]:
    """Return every rank's responses by group. Prompts are not sent: all ranks have them."""
    sent = [
        (number, replace(s, response=replace(s.response, prompt=_UNSENT))) for number, s in mine
    ]
    gathered = [
        (n, replace(s, response=replace(s.response, prompt=prompts[n])))
        for part in ranks.all_objects(sent)
        for n, s in part
    ]
    return sorted(gathered, key=lambda pair: pair[1].group)


def pack_experience(scored: Sequence[ScoredResponse]) -> Experience:
    """Lay the responses end to end. `scored` is ordered by group."""
    responses = [response.response for response in scored]
    examples = Examples.of_texts(
        [r.ids for r in responses], np.concatenate([r.marks for r in responses])
    )
    by_turns = any(r.turns for r in responses)
    turn_rewards = np.concatenate([r.turn_rewards for r in responses]) if by_turns else None
    return Experience(
        scored=tuple(scored),
        examples=examples,
        lengths=torch.tensor([len(r.generated.ids) for r in responses]),
        groups=torch.tensor([response.group for response in scored]),
        rewards=torch.tensor([r.reward + r.penalty for r in scored], dtype=torch.float32),
        sampled=torch.from_numpy(np.concatenate([r.generated.logprobs for r in responses])).float(),
        turn_rewards=None if turn_rewards is None else torch.from_numpy(turn_rewards),
    )


Measure = Callable[[Row], Mapping[str, torch.Tensor]]
"""Returns (tokens of the row,) tensors by name."""


def measure_tokens(
    experience: Experience, ranks: Ranks, *, size: int, device: torch.device, measure: Measure
) -> Experience:
    """Measure every token, each rank its own rows, without gradients."""
    rows = experience.rows(ranks.world_size, ranks.rank, size)
    measurements: dict[str, list[torch.Tensor]] = {}
    with torch.no_grad():
        for chosen in rows:
            for name, numbers in measure(experience.row(chosen).to(device)).items():
                measurements.setdefault(name, []).append(numbers.float())
    return experience.with_measurements(ranks, rows, measurements)
