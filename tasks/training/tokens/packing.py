"""Packed rows: the sequences of a micro-batch laid end to end, without padding.

Positions restart with every sequence and no token attends to another sequence (`attention.py`), so
a sequence has the same log-probabilities as alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tasks.training.tokens.examples import Examples

BUCKET_WASTE = 1.25
"""Sequences whose lengths differ by at most this factor share an attention call. Only that call is
padded, which costs at most a quarter more attention."""
TRIAL = 48
"""Largest sequence length of `trial_row`."""


@dataclass(frozen=True)
class Bucket:
    """n sequences of similar length for one attention call; the longest has L tokens."""

    # (n * L,) positions among the bucket's t tokens. Behind its end a sequence is padded with its
    # first token, which causal attention hides. None if there is no padding
    gather: torch.Tensor | None
    # (t,) positions among the n * L that are not padding; None if there is no padding
    scatter: torch.Tensor | None
    length: int  # L
    count: int  # t, the number of tokens. Buckets follow each other in the row without gaps


@dataclass(frozen=True)
class Row:
    """A packed row: S sequences of E examples, T tokens. Index tensors are int64."""

    ids: torch.Tensor  # (1, T) token ids
    positions: torch.Tensor  # (1, T) position of each token in its own sequence
    wanted: torch.Tensor  # (N,) positions in the row whose next token bears loss
    targets: torch.Tensor  # (N,) ids of these next tokens
    owner: torch.Tensor  # (N,) number of the sequence of each target
    ends: torch.Tensor  # (S,) position in the row of each sequence's last token
    examples: torch.Tensor  # (E,) numbers of the examples
    # numbers of the examples by name, (E,) or (E, roles), float32
    values: Mapping[str, torch.Tensor]
    buckets: tuple[Bucket, ...]  # sequences that share an attention call, in the order of the row
    bounds: torch.Tensor  # (S + 1,) int32, start of each sequence in the order of the row, and T

    @property
    def sequences(self) -> int:
        """Number of sequences, S."""
        return len(self.ends)

    def sums(self, per_token: torch.Tensor) -> torch.Tensor:
        """Sum over the supervised tokens of each sequence: (N,) -> (S,), in the order of `ends`."""
        zeros = torch.zeros(self.sequences, dtype=per_token.dtype, device=per_token.device)
        return zeros.index_add(0, self.owner, per_token)

    def counts(self) -> torch.Tensor:
        """Return the number of supervised tokens of each sequence, (S,), float32."""
        return torch.bincount(self.owner, minlength=self.sequences).float()

    def to(self, device: torch.device) -> Row:
        """Return the same row on another device."""
        moved: Row = self if self.ids.device == device else _moved(self, device)
        return moved


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: _moved(each, device) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_moved(each, device) for each in value)
    if isinstance(value, (Row, Bucket)):
        own = {field.name: getattr(value, field.name) for field in fields(value)}
        return replace(value, **_moved(own, device))
    return value


def pack(examples: Examples, chosen: Sequence[int], *, roles: Sequence[int] | None = None) -> Row:
    """Pack the chosen examples into one row.

    In the row sequences are sorted by length, so that those of an attention call are neighbours.
    `owner`, `ends` and all results per sequence are in the order of examples and roles.
    """
    taken = range(len(examples.roles)) if roles is None else roles
    pieces = [examples.sequence(i, role) for i in chosen for role in taken]
    lengths = np.array([len(ids) for ids, _ in pieces])
    order = np.argsort(lengths, kind="stable")
    bounds = np.concatenate([[0], np.cumsum(lengths[order])])
    starts: NDArray[np.int64] = np.zeros(len(pieces), np.int64)
    starts[order] = bounds[:-1]
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
        bounds=torch.from_numpy(bounds.astype(np.int32)),
    )


def trial_row(examples: Examples) -> Row:
    """Return two sequences of 2 to `TRIAL` tokens, all but the first token supervised.

    The row for `packed_model.require_same`. A sequence of a single token, which has nothing to
    predict, is repeated.
    """
    roles = len(examples.roles)
    places = [(0, 0), (0, 1)] if roles > 1 else [(0, 0), (1 % len(examples), 0)]
    pieces = [examples.sequence(*place)[0][:TRIAL] for place in places]
    pieces = [piece if len(piece) > 1 else np.resize(piece, 2) for piece in pieces]
    return pack(Examples.of_texts(pieces), (0, 1))


def _buckets(lengths: np.ndarray) -> Iterator[Bucket]:
    """Divide sorted sequence lengths into buckets of similar length."""
    first = 0
    for end in range(1, len(lengths) + 1):
        if end < len(lengths) and lengths[end] <= BUCKET_WASTE * lengths[first]:
            continue
        run, longest = lengths[first:end], int(lengths[end - 1])
        first, count = end, int(run.sum())
        if longest * len(run) == count:
            yield Bucket(None, None, longest, count)
            continue
        begins = np.concatenate([[0], np.cumsum(run)[:-1]])[:, None]
        steps = np.arange(longest)[None]
        inside = steps < run[:, None]
        gather = torch.from_numpy((begins + np.where(inside, steps, 0)).reshape(-1))
        yield Bucket(gather, torch.from_numpy(np.flatnonzero(inside)), longest, count)
