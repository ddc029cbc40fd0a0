"""Which examples go into which step, rank and row.

The order is a function of the seed alone, every rank knows all of it, and nothing about it is
communicated. Examples come as one endless stream, epoch after epoch, each in an order of its own; a
step takes the next `global_batch_size` of them. Within a step they are dealt into as many rows as
there are ranks and accumulation steps, the longest first, each into the row that is shortest so
far: rows that are computed at the same time hold about as many tokens.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasks.training.job import Batch
from tasks.training.tokens.examples import Examples


@dataclass(frozen=True)
class Counts:
    """What losses are divided by: of all ranks and rows together.

    Attributes:
        examples: how many.
        supervised: tokens that bear loss, by role.
        tokens: all tokens, for the throughput.
        squares: sum of the squares of the sequences' lengths, which attention's work goes with.
    """

    examples: int
    supervised: tuple[int, ...]
    tokens: int
    squares: int = 0

    @classmethod
    def of(cls, examples: Examples) -> Counts:
        """Of all examples."""
        supervised = tuple(int(n) for n in examples.supervised.sum(axis=0))
        lengths = examples.lengths.astype(np.int64)
        return cls(len(examples), supervised, int(lengths.sum()), int((lengths**2).sum()))


@dataclass(frozen=True)
class Step:
    """One optimizer step for one rank: its rows, and what all ranks do together."""

    rows: tuple[tuple[int, ...], ...]
    counts: Counts


class HeldOut(NamedTuple):
    """One row, and whether it counts; see `heldout_rounds`."""

    chosen: tuple[int, ...]
    counted: bool = True


class Order:
    """The order of a whole training run.

    Args:
        examples: all training examples, the same on every rank.
        batch: sizes and length of the run.
        seed: of the order.
        world_size: ranks.
    """

    def __init__(self, examples: Examples, batch: Batch, *, seed: int, world_size: int) -> None:
        self._examples = examples
        self._lengths = examples.lengths.sum(axis=1)
        self._squares = (examples.lengths.astype(np.int64) ** 2).sum(axis=1)
        self._supervised = examples.supervised
        self._batch = batch
        self._seed = seed
        self._kept: dict[int, NDArray[np.int64]] = {}
        self._world = world_size
        self._accumulation = batch.accumulation(world_size)
        by_epochs = math.ceil(batch.epochs * len(examples) / batch.global_batch_size)
        self.steps = max(1, by_epochs if batch.max_steps is None else batch.max_steps)

    def epoch_at(self, step: int) -> float:
        """Epochs of data seen once `step` steps were taken."""
        return step * self._batch.global_batch_size / len(self._lengths)

    def step(self, step: int, rank: int) -> Step:
        """What `rank` does in step number `step`, 1 to `steps`."""
        size = self._batch.global_batch_size
        chosen = self._stream((step - 1) * size, size)
        rows = deal(self._lengths[chosen], self._accumulation * self._world)
        mine = rows[rank :: self._world]
        return Step(tuple(tuple(int(chosen[i]) for i in row) for row in mine), self.count(chosen))

    def count(self, chosen: NDArray[np.int64]) -> Counts:
        """What the chosen examples add up to."""
        supervised = self._supervised[chosen].sum(axis=0)
        return Counts(
            len(chosen),
            tuple(int(n) for n in supervised),
            tokens=int(self._lengths[chosen].sum()),
            squares=int(self._squares[chosen].sum()),
        )

    def _stream(self, start: int, size: int) -> NDArray[np.int64]:
        n = len(self._lengths)
        epochs = range(start // n, (start + size - 1) // n + 1)
        orders = [self._permutation(epoch) for epoch in epochs]
        offset = start - epochs[0] * n
        return np.concatenate(orders)[offset : offset + size]

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        """The order of one epoch. The last two are kept: a million examples take 20 ms to shuffle,
        and a step lies in one epoch or in two.
        """
        if epoch not in self._kept:
            if len(self._kept) > 1:
                del self._kept[min(self._kept)]
            shuffled = np.random.default_rng([self._seed, epoch]).permutation(len(self._lengths))
            self._kept[epoch] = shuffled
        return self._kept[epoch]


def deal(lengths: Sequence[int] | NDArray[np.int64], rows: int) -> list[list[int]]:
    """Deal items into `rows` rows of about equal sums, none of them empty.

    Longest first into the shortest row (Graham 1969, SIAM J. Appl. Math. 17(2): the longest row is
    at most 4/3 of the best possible one). Ties go to the row with fewer items, then to the first.

    Args:
        lengths: of at least `rows` items.
        rows: how many rows.

    Returns:
        Item numbers by row, rows by descending sum.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-int(lengths[i]), i))
    heap = [(0, 0, row) for row in range(rows)]
    dealt: list[list[int]] = [[] for _ in range(rows)]
    for item in order:
        total, count, row = heapq.heappop(heap)
        dealt[row].append(item)
        heapq.heappush(heap, (total + int(lengths[item]), count + 1, row))
    sums = [sum(int(lengths[i]) for i in row) for row in dealt]
    return [dealt[row] for row in sorted(range(rows), key=lambda row: (-sums[row], row))]


HELDOUT_ROW = 8
"""Examples of a held-out row, at least, where they are short."""


def heldout_rounds(
    examples: Examples, batch: Batch, *, world_size: int, rank: int
) -> list[HeldOut]:
    """Held-out rows of one rank, as many for each rank.

    A row has more examples than a micro-batch where they are short, but never more tokens than a
    micro-batch may have: what there is memory to train on, there is memory to evaluate on.

    ZeRO-3 gathers parameters in every forward pass, so that all ranks have to make equally many:
    where the rows do not divide, some are computed once more and not counted.
    """
    lengths = examples.lengths.sum(axis=1)
    size = max(HELDOUT_ROW, batch.micro_batch_size)
    most = batch.micro_batch_size * batch.max_len * len(examples.roles)
    rows: list[list[int]] = []
    tokens = 0
    for example in np.argsort(lengths, kind="stable").tolist():
        if not rows or len(rows[-1]) == size or tokens + lengths[example] > most:
            rows.append([])
            tokens = 0
        rows[-1].append(example)
        tokens += int(lengths[example])
    found = [HeldOut(tuple(row)) for row in rows]
    found += [HeldOut(found[0].chosen, counted=False)] * (-len(found) % world_size)
    return found[rank::world_size]
