"""What is still to be done, handed out to workers that each do several tensors side by side."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from tasks.weights.execute.journal import Outcome
from tasks.weights.execute.lora_merge import fold_term, held_bytes
from tasks.weights.execute.sinks import Sink
from tasks.weights.files.dtype_conversion import casts
from tasks.weights.files.source import Source
from tasks.weights.plan.adapter_ops import LowRank, operands
from tasks.weights.plan.operations import Op

LARGE = 32 << 20
"""Bytes held for one tensor from which on it is made alone."""
_MAX_LARGE = 2
"""How many workers may be at such a tensor at a time."""


@dataclass(frozen=True)
class Task:
    """One tensor to be made.

    Attributes:
        op: what it is.
        sink: where it goes.
        earlier: what an earlier run entered for it; to be verified.
        fold: its only term, where that is done without torch.
        held: bytes that stay in memory while it is made, blocks left out.
    """

    op: Op
    sink: Sink
    earlier: Outcome | None
    fold: LowRank | None
    held: int

    @property
    def needs_torch(self) -> bool:
        """Whether torch has to be imported for it."""
        if self.op.kind == "cast":
            return not casts(self.op.source_dtype, self.op.dtype)
        return self.op.kind == "compute" and self.fold is None


def make_task(op: Op, sources: Mapping[str, Source], sink: Sink, earlier: Outcome | None) -> Task:
    """The task of an operation."""
    if op.kind != "compute":
        return Task(op, sink, earlier, None, 0)
    term = fold_term(op, sources)
    if term is not None:
        return Task(op, sink, earlier, term, held_bytes(term, sources))
    return Task(op, sink, earlier, None, _held(op, sources))


def _held(op: Op, sources: Mapping[str, Source]) -> int:
    from tasks.weights.execute.full_tensors import needs_whole

    count = 2 * prod(op.read_shape) if needs_whole(op) else 0
    for name in (name for term in op.terms for name in operands(term)):
        input_name, _, key = name.partition(":")
        count += prod(sources[input_name].tensors[key].shape)
    return 4 * count


class Pending:
    """Tasks by size, the largest first, so that no worker is left with a large one at the end.

    Those that need torch come in when it is imported; the others are begun meanwhile.

    Args:
        tasks: all of them.
        workers: among how many they are divided.
        lanes: the most that one worker may have in hand.
    """

    def __init__(self, tasks: Iterable[Task], workers: int, lanes: int) -> None:
        ordered = sorted(tasks, key=lambda task: -task.op.nbytes)
        self._ready = [task for task in ordered if not task.needs_torch]
        self._later = [task for task in ordered if task.needs_torch]
        # A few tensors are spread over the workers rather than hashed side by side by one of them.
        self.lanes = max(1, min(lanes, -(-len(ordered) // workers)))
        self._large, self._closed = 0, False
        self._changed = threading.Condition()

    @property
    def waits_for_torch(self) -> bool:
        """Whether some tasks are held back until `torch_is_there`."""
        return bool(self._later)

    def torch_is_there(self) -> None:
        """Hand out the rest."""
        with self._changed:
            self._ready, self._later = [*self._ready, *self._later], []
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing more is handed out: a worker has failed, or the user has had enough."""
        with self._changed:
            self._ready, self._later, self._closed = [], [], True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def take(self, in_hand: int, held: int) -> Task | None:
        """The next task for a worker; waits for one only when it has nothing else to do.

        Args:
            in_hand: how many tasks the worker has begun and not finished.
            held: `Task.held` of them together.

        Returns:
            None when there is nothing, or nothing that fits beside the others.
        """
        with self._changed:
            while True:
                for index, task in enumerate(self._ready):
                    if self._fits(task, in_hand, held):
                        self._large += task.held > LARGE
                        return self._ready.pop(index)
                if in_hand or not (self._ready or self._later):
                    return None
                self._changed.wait()

    def done(self, task: Task) -> None:
        """A task that was taken has been finished."""
        if task.held > LARGE:
            with self._changed:
                self._large -= 1
                self._changed.notify_all()

    def _fits(self, task: Task, in_hand: int, held: int) -> bool:
        if task.held > LARGE:
            return not in_hand and self._large < _MAX_LARGE
        return in_hand < self.lanes and held + task.held <= LARGE
