"""One iteration's replies as every rank knows them, and the packed rows that they are laid into."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tasks.rl.experience.responses import Generated, Prompt, Reply, Scored
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.tokens.examples import Examples
from tasks.training.tokens.order import deal
from tasks.training.tokens.packing import Row, pack

REPLY = np.array([0, 1], np.uint8)
"""Marks of a prompt's tokens and of a reply's."""


class _Told(NamedTuple):
    """What a rank says of one of its replies; prompts are known to all."""

    group: int
    number: int
    place: int
    generated: Generated
    text: str
    reward: float
    parts: dict[str, float]


@dataclass(frozen=True)
class Experience:
    """S replies of N tokens, in the order of their groups; the same on every rank.

    Attributes:
        scored: the replies and what they were worth.
        examples: prompts with replies as sequences, the reply's tokens marked.
        lengths: (S,) tokens of each reply, int64.
        groups: (S,) number of each reply's prompt within the iteration, int64.
        rewards: (S,) float32.
        sampled: (N,) the engine's log-probabilities.
        old: (N,) the trainer's, before the update.
        reference: (N,) the reference model's; None where none is asked.
        values: (N,) the critic's; None without one.
    """

    scored: tuple[Scored, ...]
    examples: Examples
    lengths: torch.Tensor
    groups: torch.Tensor
    rewards: torch.Tensor
    sampled: torch.Tensor
    old: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    values: torch.Tensor | None = None

    @property
    def owner(self) -> torch.Tensor:
        """(N,) the reply of each token."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)

    def places(self, chosen: Sequence[int]) -> torch.Tensor:
        """Places among N of the tokens of these replies, reply by reply."""
        ends = self.lengths.cumsum(0)
        begins = ends - self.lengths
        return torch.cat([torch.arange(int(begins[i]), int(ends[i])) for i in chosen])

    def row(self, chosen: Sequence[int]) -> Row:
        """The chosen prompts and replies end to end."""
        return pack(self.examples, chosen)

    def rows(self, world_size: int, rank: int, size: int) -> list[tuple[int, ...]]:
        """All replies dealt into rows of about `size`, this rank's; equally many for each rank."""
        lengths = self.examples.lengths.sum(axis=1)
        count = -(-len(lengths) // (size * world_size)) * world_size
        count = min(count, len(lengths) // world_size * world_size)
        return [tuple(row) for row in deal(lengths, count)[rank::world_size]]

    def with_measured(
        self, ranks: Ranks, rows: Sequence[tuple[int, ...]], found: Mapping[str, list[torch.Tensor]]
    ) -> Experience:
        """The same with what ranks measured of their rows' tokens: `old`, `reference`, `values`.

        Args:
            ranks: all of them take part.
            rows: this rank's.
            found: by name, (tokens of the row,) for each of the rows.
        """
        mine = {name: [part.cpu().numpy() for part in parts] for name, parts in found.items()}
        told = ranks.all_objects((list(rows), mine))
        whole: dict[str, torch.Tensor] = {}
        for name in found:
            numbers = torch.full((int(self.lengths.sum()),), torch.nan)
            for chosen, parts in told:
                for row, part in zip(chosen, parts[name], strict=True):
                    numbers[self.places(row)] = torch.from_numpy(part).float()
            whole[name] = numbers
        return replace(self, **whole)


def together(ranks: Ranks, mine: Sequence[tuple[int, Scored]], prompts: Sequence[Prompt]
             ) -> list[tuple[int, Scored]]:  # fmt: skip
    """Every rank's replies, in the order of groups and of replies within them.

    Args:
        ranks: all of them take part.
        mine: this rank's, each with the number of its prompt in the dataset.
        prompts: of the dataset.
    """
    seen: dict[int, int] = {}
    told = []
    for number, one in mine:
        place = seen[one.group] = seen.get(one.group, -1) + 1
        told.append(
            _Told(one.group, number, place, one.reply.generated, one.reply.text, one.reward,
                  dict(one.parts))
        )  # fmt: skip
    every = sorted(
        (one for part in ranks.all_objects(told) for one in part), key=lambda t: (t.group, t.place)
    )
    return [
        (
            t.number,
            Scored(Reply(prompts[t.number], t.generated, t.text), t.group, t.reward, t.parts),
        )
        for t in every
    ]


def experience(scored: Sequence[Scored]) -> Experience:
    """Lay the replies end to end. `scored` is in the order of groups."""
    replies = [one.reply for one in scored]
    pieces = [np.concatenate([r.prompt.ids, r.generated.ids]) for r in replies]
    marks: list[NDArray[np.uint8]] = [
        np.repeat(REPLY, [len(r.prompt.ids), len(r.generated.ids)]) for r in replies
    ]
    bounds: NDArray[np.int64] = np.concatenate([[0], np.cumsum([len(p) for p in pieces])])
    names = tuple(str(r.prompt.row.get("id", "")) for r in replies)
    examples = Examples(
        ("text",), names, np.concatenate(pieces).astype(np.int32), np.concatenate(marks), bounds, {}
    )
    return Experience(
        scored=tuple(scored),
        examples=examples,
        lengths=torch.tensor([len(r.generated.ids) for r in replies]),
        groups=torch.tensor([one.group for one in scored]),
        rewards=torch.tensor([one.reward for one in scored], dtype=torch.float32),
        sampled=torch.from_numpy(np.concatenate([r.generated.logprobs for r in replies])).float(),
    )


Measure = Callable[[Row], Mapping[str, torch.Tensor]]


def measured(
    got: Experience, ranks: Ranks, *, size: int, device: torch.device, measure: Measure
) -> Experience:
    """Ask for every token's numbers, each rank of its own rows, without gradient.

    Args:
        got: the replies.
        ranks: all of them take part, with equally many rows.
        size: replies of a row.
        device: where rows go.
        measure: a row -> (tokens of the row,) by name.
    """
    rows = got.rows(ranks.world_size, ranks.rank, size)
    found: dict[str, list[torch.Tensor]] = {}
    with torch.no_grad():
        for chosen in rows:
            for name, numbers in measure(got.row(chosen).to(device)).items():
                found.setdefault(name, []).append(numbers.float())
    return got.with_measured(ranks, rows, found)
