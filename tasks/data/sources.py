"""Read several sources of rows in order, or mix them by probability.

    sources without probabilities   all rows of the first, then all of the second, ...
    sources with probabilities      each row comes from a source chosen at random; a seed gives the
                                    same rows in the same order on every machine

Mixing ends with the first source that is exhausted (`first_exhausted`), or when all were read once
(`all_exhausted`). In the second case smaller sources are read again from the start.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tasks.core.errors import DataError
from tasks.data.columns import Columns
from tasks.data.readers import Row

FIRST_EXHAUSTED, ALL_EXHAUSTED = "first_exhausted", "all_exhausted"
TOLERANCE = 1e-6
"""Allowed difference of the sum of all probabilities from 1."""


@dataclass(frozen=True)
class Source:
    """One source of rows; `open` returns them from the start, once for every pass.

    Without a `probability` sources are read in order. `max_samples` limits the rows of one pass.
    """

    name: str
    open: Callable[[], Iterator[Row]]
    columns: Columns
    probability: float | None = None
    max_samples: int | None = None

    def rows(self) -> Iterator[Row]:
        """Return an iterator over its rows, for one pass."""
        return itertools.islice(self.open(), self.max_samples)


class MixedRow(NamedTuple):
    """A row of a mixture: index of its source, the row, and True if the source was read before."""

    source: int
    row: Row
    again: bool


def wrong_probabilities(probabilities: Sequence[float | None]) -> str:
    """Return the problem with the probabilities of several sources; "" if there is none."""
    known = [p for p in probabilities if p is not None]
    if not known:
        return ""
    if len(known) < len(probabilities):
        return (
            f"{len(known)} of {len(probabilities)} sources have a probability: all of them or none"
        )
    if min(known) <= 0:
        return f"probability {min(known):g} never selects a row"
    if abs(sum(known) - 1) > TOLERANCE:
        return f"probabilities add up to {sum(known):g}, not to 1"
    return ""


def mix(sources: Sequence[Source], *, seed: int, stopping: str) -> Iterator[MixedRow]:
    """Yield the rows of all sources, of which all have a probability or none; one row in memory.

    Raises:
        DataError: a source with a probability has no rows.
    """
    if sources[0].probability is None:
        for number, source in enumerate(sources):
            yield from (MixedRow(number, row, again=False) for row in source.rows())
        return
    draw = random.Random(f"mix {seed}")
    numbers, weights = range(len(sources)), [source.probability or 0.0 for source in sources]
    streams = [source.rows() for source in sources]
    exhausted: set[int] = set()
    while True:
        (number,) = draw.choices(numbers, weights)
        row = next(streams[number], None)
        if row is None:
            exhausted.add(number)
            if stopping == FIRST_EXHAUSTED or len(exhausted) == len(sources):
                return
            streams[number] = sources[number].rows()
            row = next(streams[number], None)
            if row is None:
                raise DataError(f"{sources[number].name} has no rows to mix")
        yield MixedRow(number, row, again=number in exhausted)
