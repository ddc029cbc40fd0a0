"""Packed rows: the sequences of a micro-batch laid end to end, with no padding anywhere.

Positions restart with every sequence, and no token attends to a neighbour's (`attention.py`), so
that a sequence's log-probabilities are those it has alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray

from tasks.training.tokens.examples import Examples

BUCKET_WASTE = 1.25
"""Sequences whose lengths differ by at most this factor share one attention call. Padding exists
inside of that call alone; 1.25 costs at most a quarter more of attention's small share."""
TRIAL = 48
"""Tokens of a sequence with which the packed pass is tried before training."""


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, one attention call; n of them, the longest has L tokens.

    Attributes:
        gather: (n * L,) places among the bucket's own tokens; past its end a sequence repeats its
            first token, which under causal attention no real token sees. None without padding.
        scatter: (t,) which of the n * L places are real; None without padding.
        length: L.
        count: t, its tokens; buckets follow each other in the row without a gap.
    """

    gather: torch.Tensor | None
    scatter: torch.Tensor | None
    length: int
    count: int


@dataclass(frozen=True)
class Row:
    """S sequences of E examples, T tokens. All index tensors are int64.

    Attributes:
        ids: (1, T) token ids.
        positions: (1, T) place of each token in its own sequence.
        wanted: (N,) places whose next token bears loss.
        targets: (N,) those next tokens.
        owner: (N,) the sequence that each belongs to.
        ends: (S,) place of each sequence's last token.
        examples: (E,) which examples these are.
        values: numbers of the examples, (E,) or (E, roles), float32.
        buckets: of the attention, in the row's order.
        bounds: (S + 1,) int32, place at which each sequence of the row begins, and T.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    wanted: torch.Tensor
    targets: torch.Tensor
    owner: torch.Tensor
    ends: torch.Tensor
    examples: torch.Tensor
    values: Mapping[str, torch.Tensor]
    buckets: tuple[Bucket, ...]
    bounds: torch.Tensor

    @property
    def sequences(self) -> int:
        """S."""
        return len(self.ends)

    def sums(self, per_token: torch.Tensor) -> torch.Tensor:
        """Sum over each sequence's supervised tokens: (N,) -> (S,), in the order of `ends`."""
        zeros = torch.zeros(self.sequences, dtype=per_token.dtype, device=per_token.device)
        return zeros.index_add(0, self.owner, per_token)

    def counts(self) -> torch.Tensor:
        """Supervised tokens of each sequence, (S,), float32."""
        return torch.bincount(self.owner, minlength=self.sequences).float()

    def to(self, device: torch.device) -> Row:
        """Return the same row on another device."""
        if self.ids.device == device:
            return self
        moved = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        values = {name: value.to(device) for name, value in self.values.items()}
        buckets = tuple(
            replace(
                b,
                gather=None if b.gather is None else b.gather.to(device),
                scatter=None if b.scatter is None else b.scatter.to(device),
            )
            for b in self.buckets
        )
        return replace(self, **moved, values=values, buckets=buckets)


def pack(examples: Examples, chosen: Sequence[int], *, roles: Sequence[int] | None = None) -> Row:
    """Lay the chosen examples end to end.

    Sequences lie in the row by length, so that those of one attention call are neighbours; `owner`,
    `ends` and everything that is per sequence keep the order example by example, role by role.

    Args:
        examples: the dataset.
        chosen: which of them.
        roles: numbers of the roles to take; None takes all.
    """
    taken = range(len(examples.roles)) if roles is None else roles
    pieces = [examples.sequence(i, role) for i in chosen for role in taken]
    lengths = np.array([len(ids) for ids, _ in pieces])
    order = np.argsort(lengths, kind="stable")
    starts: NDArray[np.int64] = np.zeros(len(pieces), np.int64)
    starts[order] = np.concatenate([[0], np.cumsum(lengths[order])[:-1]])
    ids = np.concatenate([pieces[i][0] for i in order]).astype(np.int64)
    positions = np.concatenate([np.arange(lengths[i]) for i in order])
    wanted = [starts[i] + np.flatnonzero(bears[1:]) for i, (_, bears) in enumerate(pieces)]
    places = np.concatenate(wanted)
    values = {
        name: torch.from_numpy(np.ascontiguousarray(array[list(chosen)]))
        for name, array in examples.values.items()
    }
    return Row(
        ids=torch.from_numpy(ids)[None],
        positions=torch.from_numpy(positions)[None],
        wanted=torch.from_numpy(places),
        targets=torch.from_numpy(ids[places + 1]),
        owner=torch.from_numpy(np.repeat(np.arange(len(pieces)), [len(w) for w in wanted])),
        ends=torch.from_numpy(starts + lengths - 1),
        examples=torch.tensor(list(chosen)),
        values=values,
        buckets=tuple(_buckets(lengths[order])),
        bounds=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths[order])]).astype(np.int32)),
    )


def trial_row(examples: Examples) -> Row:
    """Two sequences of 2 to `TRIAL` tokens, every token but the first supervised.

    For `packed_model.require_same`: enough to see whether neighbours are kept apart, and short
    enough to cost nothing. A sequence of one token would be asked for nothing: it is said twice.
    """
    roles = len(examples.roles)
    places = [(0, 0), (0, 1)] if roles > 1 else [(0, 0), (1 % len(examples), 0)]
    pieces = [examples.sequence(*place)[0][:TRIAL] for place in places]
    pieces = [piece if len(piece) > 1 else np.resize(piece, 2) for piece in pieces]
    bounds = np.concatenate([[0], np.cumsum([len(ids) for ids in pieces])])
    ids = np.concatenate(pieces)
    return pack(
        Examples(("text",), ("a", "b"), ids, np.ones(len(ids), np.uint8), bounds, {}), (0, 1)
    )


def _buckets(lengths: np.ndarray) -> list[Bucket]:
    """Cut sorted sequences into runs of similar length."""
    cuts = [0]
    for i, length in enumerate(lengths):
        if length > BUCKET_WASTE * lengths[cuts[-1]]:
            cuts.append(i)
    pairs = zip(cuts, [*cuts[1:], len(lengths)], strict=True)
    return [_bucket(lengths[first:end]) for first, end in pairs]


def _bucket(run: np.ndarray) -> Bucket:
    longest, count = int(run[-1]), int(run.sum())
    if longest * len(run) == count:
        return Bucket(None, None, longest, count)
    begins = np.concatenate([[0], np.cumsum(run)[:-1]])[:, None]
    steps = np.arange(longest)[None]
    inside = steps < run[:, None]
    gather = begins + np.where(inside, steps, 0)
    return Bucket(
        gather=torch.from_numpy(gather.reshape(-1)),
        scatter=torch.from_numpy(np.flatnonzero(inside)),
        length=longest,
        count=count,
    )
