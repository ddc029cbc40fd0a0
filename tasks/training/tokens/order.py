"""Order of the examples: assign them to steps, ranks and rows.

The order depends on the seed alone; every rank computes all of it, without communication. Each
epoch is shuffled differently, and a step takes the next `global_batch_size` examples of it; the
last step of an epoch takes what is left, as in HF's Trainer. Within a step they are dealt to ranks
x accumulation steps rows, longest first, each into the row with the fewest tokens so far. So rows
that are computed at the same time have about equally many tokens. Rows that are padded get examples
of similar length instead.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
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


class Step(NamedTuple):
    """One optimizer step of one rank: its rows, and the totals over all ranks."""

    rows: tuple[Dealt, ...]
    totals: Totals


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

    def step(self, step: int, rank: int) -> Step:
        """Return the rows of `rank` in step number `step`, 1 to `steps`."""
        epoch, before = divmod(step - 1, self._per_epoch)
        if self._shuffled is None or self._shuffled[0] != epoch:
            generator = np.random.default_rng([self._seed, epoch])
            self._shuffled = epoch, generator.permutation(len(self._lengths))
        chosen = self._shuffled[1][before * self._size : (before + 1) * self._size]
        lengths = self._lengths[chosen].sum(axis=1)
        rows = deal(lengths, self._accumulation * self._world, padded=self._padded)
        spare = Dealt((int(chosen[np.argmin(lengths)]),), counted=False)
        mine = rows[rank :: self._world]
        dealt = (Dealt(tuple(chosen[row].tolist())) if row else spare for row in mine)
        return Step(tuple(dealt), Totals.of(self._supervised[chosen], self._lengths[chosen]))


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


def heldout_rounds(examples: Examples, batch: Batch, *, world_size: int, rank: int) -> list[Dealt]:
    """Return one rank's rows of evaluation examples; every rank gets equally many.

    A row may have more examples than a micro-batch if they are short, but never more tokens than a
    micro-batch may have, so an evaluation needs no more memory than training. Under ZeRO-3 all
    ranks have to make equally many forward passes: if the number of rows is not a multiple of the
    ranks, the first row is repeated and its repetitions are not `counted`.
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
    rounds = [Dealt(tuple(row)) for row in rows]
    rounds += [Dealt(rounds[0].chosen, counted=False)] * (-len(rounds) % world_size)
    return rounds[rank::world_size]
