"""Order of the examples: assign them to steps, ranks and rows.

The order depends on the seed alone; every rank computes all of it, without communication. Examples
form an endless stream of epochs, each shuffled differently, and a step takes the next
`global_batch_size` of them. Within a step they are dealt to ranks x accumulation steps rows,
longest first, each into the row with the fewest tokens so far. So rows that are computed at the
same time have about equally many tokens.
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
    """Totals over all ranks and rows of a step, by which losses are divided.

    Attributes:
        examples: number of examples.
        supervised: number of tokens that bear loss, per role.
        tokens: number of all tokens, for the throughput.
        squares: sum of the squared sequence lengths, to which attention's cost is proportional.
    """

    examples: int
    supervised: tuple[int, ...]
    tokens: int
    squares: int = 0

    @classmethod
    def of(cls, examples: Examples) -> Counts:
        """Count all examples of a split."""
        supervised = tuple(int(n) for n in examples.supervised.sum(axis=0))
        lengths = examples.lengths.astype(np.int64)
        return cls(len(examples), supervised, int(lengths.sum()), int((lengths**2).sum()))


@dataclass(frozen=True)
class Step:
    """One optimizer step of one rank: its rows, and the totals over all ranks."""

    rows: tuple[tuple[int, ...], ...]
    counts: Counts


class HeldOut(NamedTuple):
    """Examples of one row; rows that are not `counted` are repetitions, see `heldout_rounds`."""

    chosen: tuple[int, ...]
    counted: bool = True


class Order:
    """Order of the examples in a training run.

    Args:
        examples: all training examples, the same on every rank.
        batch: batch sizes and length of the run.
        seed: seed of the order.
        world_size: number of ranks, or of groups of ranks that share their rows.
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
        """Return the number of epochs seen after `step` steps."""
        return step * self._batch.global_batch_size / len(self._lengths)

    def step(self, step: int, rank: int) -> Step:
        """Return the rows of `rank` in step number `step`, 1 to `steps`."""
        size = self._batch.global_batch_size
        chosen = self._stream((step - 1) * size, size)
        rows = deal(self._lengths[chosen], self._accumulation * self._world)
        mine = rows[rank :: self._world]
        return Step(tuple(tuple(int(chosen[i]) for i in row) for row in mine), self.count(chosen))

    def count(self, chosen: NDArray[np.int64]) -> Counts:
        """Return the totals of the chosen examples."""
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
        """Return the order of one epoch; two are kept, since a step may lie in two epochs."""
        if epoch not in self._kept:
            if len(self._kept) > 1:
                del self._kept[min(self._kept)]
            shuffled = np.random.default_rng([self._seed, epoch]).permutation(len(self._lengths))
            self._kept[epoch] = shuffled
        return self._kept[epoch]


def deal(lengths: Sequence[int] | NDArray[np.int64], rows: int) -> list[list[int]]:
    """Deal items into `rows` rows of about equal sums, none of them empty.

    Items go longest first into the shortest row (Graham 1969, SIAM J. Appl. Math. 17(2): the
    longest row is at most 4/3 of the optimum). Ties go to the row with fewer items, then to the
    first.

    Args:
        lengths: lengths of at least `rows` items.
        rows: number of rows.

    Returns:
        Item numbers of each row; rows by descending sum.
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
"""Smallest limit of examples in a row of evaluation examples."""


def heldout_rounds(
    examples: Examples, batch: Batch, *, world_size: int, rank: int
) -> list[HeldOut]:
    """Return one rank's rows of evaluation examples; every rank gets equally many.

    A row may have more examples than a micro-batch if they are short, but never more tokens than a
    micro-batch may have, so an evaluation needs no more memory than training.

    Under ZeRO-3 all ranks have to make equally many forward passes. If the number of rows is not a
    multiple of the ranks, the first row is repeated and its repetitions are not `counted`.

    Args:
        examples: evaluation examples.
        batch: batch sizes of the run.
        world_size: number of ranks, or of groups of ranks that share their rows.
        rank: this rank or group.
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
    rounds = [HeldOut(tuple(row)) for row in rows]
    rounds += [HeldOut(rounds[0].chosen, counted=False)] * (-len(rounds) % world_size)
    return rounds[rank::world_size]
