"""Rows of examples: assigned to steps and ranks, and packed without padding.

The order depends on the seed alone; every rank computes all of it, without communication. Each
epoch is shuffled differently, and a step takes the next `global_batch_size` examples of it; the
last step of an epoch takes what is left, as in HF's Trainer. Within a step they are dealt to ranks
x accumulation steps rows, longest first, each into the row with the fewest tokens so far. So rows
that are computed at the same time have about equally many tokens. Rows that are padded get examples
of similar length instead. In a packed row positions restart with every sequence, and no token
attends to another sequence (`attention.py`), so a sequence has the same log-probabilities as alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tasks.training.job import Batch
from tasks.training.tokens.examples import Examples

HELDOUT_ROW = 8
"""Smallest limit of examples in a row of evaluation examples."""


class Totals(NamedTuple):
    """Totals over all ranks and rows of a step, by which losses are divided."""

    examples: int  # number of examples
    supervised: tuple[int, ...]  # number of tokens that bear loss, per role
    tokens: int  # number of all tokens, for the throughput

    @classmethod
    def of(cls, supervised: NDArray[np.int64], lengths: NDArray[np.int64]) -> Totals:
        """Add up examples of these numbers of supervised and of all tokens, (E, R)."""
        return cls(len(lengths), tuple(supervised.sum(axis=0).tolist()), int(lengths.sum()))


class Dealt(NamedTuple):
    """Examples of a row; one that is not `counted` is repeated, so that ranks make equal passes."""

    chosen: tuple[int, ...]
    counted: bool = True


class Order:
    """Order of the examples in a training run, the same on every rank.

    `world_size` counts ranks, or groups of ranks that share their rows. `padded`: see `deal`.
    """

    def __init__(
        self, examples: Examples, batch: Batch, *, seed: int, world_size: int, padded: bool = False
    ) -> None:
        self._lengths, self._supervised = examples.lengths, examples.supervised
        self._size, self._seed, self._world = batch.global_batch_size, seed, world_size
        self._padded = padded
        self._shuffled: tuple[int, NDArray[np.int64]] | None = None
        self._accumulation = batch.accumulation(world_size)
        self._per_epoch = math.ceil(len(examples) / self._size)
        by_epochs = math.ceil(batch.epochs * self._per_epoch)
        self.steps = max(1, by_epochs if batch.max_steps is None else batch.max_steps)

    def epoch_at(self, step: int) -> float:
        """Return the number of epochs seen after `step` steps."""
        epochs, steps = divmod(step, self._per_epoch)
        return epochs + steps * self._size / len(self._lengths)

    def step(self, step: int, rank: int) -> tuple[list[Dealt], Totals]:
        """Return the rows of `rank` in step number `step`, 1 to `steps`; totals over all ranks."""
        epoch, before = divmod(step - 1, self._per_epoch)
        if self._shuffled is None or self._shuffled[0] != epoch:
            generator = np.random.default_rng([self._seed, epoch])
            self._shuffled = epoch, generator.permutation(len(self._lengths))
        chosen = self._shuffled[1][before * self._size : (before + 1) * self._size]
        lengths = self._lengths[chosen].sum(axis=1)
        rows = deal(lengths, self._accumulation * self._world, padded=self._padded)
        spare = Dealt((int(chosen[np.argmin(lengths)]),), counted=False)
        mine = rows[rank :: self._world]
        dealt = [Dealt(tuple(chosen[row].tolist())) if row else spare for row in mine]
        return dealt, Totals.of(self._supervised[chosen], self._lengths[chosen])


def deal(
    lengths: Sequence[int] | NDArray[np.int64], rows: int, *, padded: bool = False
) -> list[list[int]]:
    """Deal items into `rows` rows of about equal sums; with fewer items than rows some are empty.

    Items go longest first into the shortest row (Graham 1969, SIAM J. Appl. Math. 17(2): the
    longest row is at most 4/3 of the optimum). Ties go to the row with fewer items, then to the
    first. Returns item numbers of each row; rows by descending sum.

    Rows that are `padded` to their longest item get neighbours in length, and equally many.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-int(lengths[i]), i))
    if padded:
        return [part.tolist() for part in np.array_split(np.array(order), rows)]
    heap: list[tuple[int, int, int]] = [(0, 0, row) for row in range(rows)]
    dealt: list[list[int]] = [[] for _ in range(rows)]
    for item in order:
        total, count, row = heap[0]
        dealt[row].append(item)
        heapq.heapreplace(heap, (total + int(lengths[item]), count + 1, row))
    return [dealt[row] for _, row in sorted((-total, row) for total, _, row in heap)]


def filled(lengths: Sequence[int], tokens: int, items: int | None = None) -> list[list[int]]:
    """Return rows of item numbers, shortest first, of at most `tokens` tokens and `items` items.

    A longer item gets a row of its own.
    """
    rows: list[list[int]] = []
    room = 0
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        room -= lengths[number]
        if not rows or room < 0 or len(rows[-1]) == items:
            rows.append([])
            room = tokens - lengths[number]
        rows[-1].append(number)
    return rows


def heldout_rounds(examples: Examples, batch: Batch, *, world_size: int, rank: int) -> list[Dealt]:
    """Return one rank's rows of evaluation examples; every rank gets equally many.

    A row may have more examples than a micro-batch if they are short, but never more tokens than a
    micro-batch may have, so an evaluation needs no more memory than training. Under ZeRO-3 all
    ranks have to make equally many forward passes: if the number of rows is not a multiple of the
    ranks, the first row is repeated and its repetitions are not `counted`.
    """
    most = batch.micro_batch_size * batch.max_len * len(examples.roles)
    size = max(HELDOUT_ROW, batch.micro_batch_size)
    rows = filled(examples.lengths.sum(axis=1).tolist(), most, size)
    rounds = [Dealt(tuple(row)) for row in rows]
    rounds += [Dealt(rounds[0].chosen, counted=False)] * (-len(rounds) % world_size)
    return rounds[rank::world_size]


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
