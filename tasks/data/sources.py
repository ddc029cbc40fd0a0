"""Sources of rows, one after the other or mixed by probability.

    sources without probabilities   all rows of the first, then all of the second, ...
    sources with probabilities      every row is drawn from a source chosen at random: the same
                                    rows in the same order for the same seed on every machine

Mixing ends with the first source that is used up (`first_exhausted`), or goes on until each was
read once (`all_exhausted`): smaller ones are then read again from their start.
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
"""By how much probabilities may miss 1."""


@dataclass(frozen=True)
class Source:
    """Where rows come from.

    Attributes:
        name: the file or the hub's id, for messages and the account.
        open: its rows, from the start; called once for every pass.
        columns: what its columns are called.
        probability: of a row to come from here; None for sources that are read one by one.
        max_samples: rows read in one pass at most.
    """

    name: str
    open: Callable[[], Iterator[Row]]
    columns: Columns
    probability: float | None = None
    max_samples: int | None = None

    def rows(self) -> Iterator[Row]:
        """One pass over its rows."""
        return itertools.islice(self.open(), self.max_samples)


class Drawn(NamedTuple):
    """A row, the number of its source, and whether the source was read before."""

    source: int
    row: Row
    again: bool


def wrong_probabilities(given: Sequence[float | None]) -> str:
    """What is wrong with the probabilities of several sources; empty when nothing is."""
    known = [p for p in given if p is not None]
    if not known:
        return ""
    if len(known) < len(given):
        return f"{len(known)} of {len(given)} sources have a probability: all of them or none"
    if min(known) <= 0:
        return f"probability {min(known):g} never draws a row"
    if abs(sum(known) - 1) > TOLERANCE:
        return f"probabilities add up to {sum(known):g}, not to 1"
    return ""


def mix(sources: Sequence[Source], *, seed: int, stopping: str) -> Iterator[Drawn]:
    """The rows of all sources; nothing but the row in hand is in memory.

    Args:
        sources: at least one; all have a probability, or none has.
        seed: of the draw.
        stopping: `first_exhausted` or `all_exhausted`; plays no part without probabilities.

    Raises:
        DataError: a source without rows is to be drawn from.
    """
    if sources[0].probability is None:
        for number, source in enumerate(sources):
            yield from (Drawn(number, row, again=False) for row in source.rows())
        return
    draw = random.Random(f"mix {seed}")
    numbers, weights = range(len(sources)), [source.probability or 0.0 for source in sources]
    streams = [source.rows() for source in sources]
    used_up: set[int] = set()
    while True:
        (number,) = draw.choices(numbers, weights)
        row = next(streams[number], None)
        if row is None:
            used_up.add(number)
            if stopping == FIRST_EXHAUSTED or len(used_up) == len(sources):
                return
            streams[number] = sources[number].rows()
            row = next(streams[number], None)
            if row is None:
                raise DataError(f"{sources[number].name} has no rows to draw from")
        yield Drawn(number, row, again=number in used_up)
