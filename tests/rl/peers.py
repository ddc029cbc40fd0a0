"""Ranks in this process: a thread each, which exchange objects as `Ranks.all_objects` does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE_S = 60.0


@dataclass
class _Table:
    """Where ranks lay down what they tell each other."""

    gate: threading.Barrier
    told: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Peer:
    """The part of `Ranks` that needs no tensors."""

    rank: int
    world_size: int
    _table: _Table

    @property
    def first(self) -> bool:
        return self.rank == 0

    def all_objects(self, value: T) -> list[T]:
        self._table.told[self.rank] = value
        self._table.gate.wait(PATIENCE_S)
        found = list(self._table.told)
        self._table.gate.wait(PATIENCE_S)
        return found


def on_ranks(count: int, work: Callable[[Any], T]) -> list[T]:
    """What `work(ranks)` gives on each of so many ranks; what one raises is raised here."""
    table = _Table(threading.Barrier(count), [None] * count)

    def one(rank: int) -> T:
        try:
            return work(Peer(rank, count, table))
        except BaseException:
            table.gate.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(one, rank) for rank in range(count)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
