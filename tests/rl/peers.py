"""Ranks as threads of this process, which exchange objects like `Ranks.all_objects`."""

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
    """Shared memory of the ranks."""

    gate: threading.Barrier
    objects: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Peer:
    """The part of `Ranks` that needs no tensors."""

    rank: int
    world_size: int
    _table: _Table
    device: Any = "cpu"

    @property
    def first(self) -> bool:
        return self.rank == 0

    def all_objects(self, value: T) -> list[T]:
        self._table.objects[self.rank] = value
        self._table.gate.wait(PATIENCE_S)
        objects = list(self._table.objects)
        self._table.gate.wait(PATIENCE_S)
        return objects


def alone() -> Peer:
    """Return the only rank."""
    return Peer(0, 1, _Table(threading.Barrier(1), [None]))


def on_ranks(count: int, work: Callable[[Any], T]) -> list[T]:
    """Return `work(ranks)` of each rank; raise the error of any of them."""
    table = _Table(threading.Barrier(count), [None] * count)

    def run_rank(rank: int) -> T:
        try:
            return work(Peer(rank, count, table))
        except BaseException:
            table.gate.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(run_rank, rank) for rank in range(count)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
