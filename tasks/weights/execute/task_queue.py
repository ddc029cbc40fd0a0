"""Queue of the tensors still to be written; workers take several at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from tasks.weights.execute.journal import Outcome
from tasks.weights.execute.lora_merge import fold_term, size_of_a
from tasks.weights.execute.sinks import Sink
from tasks.weights.files.dtype_conversion import casts
from tasks.weights.files.source import Source
from tasks.weights.plan.adapter_ops import LowRank, operands
from tasks.weights.plan.operations import Op

LARGE = 32 << 20
"""Memory in bytes from which on a worker handles a tensor alone."""
_MAX_LARGE = 2
"""Number of workers that may handle such a tensor at the same time."""


@dataclass(frozen=True)
class Task:
    """One tensor to be written.

    Attributes:
        op: operation that makes it.
        sink: position in its output file.
        earlier: result that an earlier run entered for it, to be verified; None if there is none.
        fold: its only term if the C kernel can apply it; None if not.
        memory: bytes of memory that it takes in addition to its blocks.
    """

    op: Op
    sink: Sink
    earlier: Outcome | None
    fold: LowRank | None
    memory: int

    @property
    def needs_torch(self) -> bool:
        """True if torch has to be imported for the tensor."""
        if self.op.kind == "cast":
            return not casts(self.op.source_dtype, self.op.dtype)
        return self.op.kind == "compute" and self.fold is None


def make_task(op: Op, sources: Mapping[str, Source], sink: Sink, earlier: Outcome | None) -> Task:
    """Return the task of an operation.

    Args:
        op: the operation.
        sources: inputs of the plan by name.
        sink: position of the tensor in its output file.
        earlier: result that an earlier run entered for it; None if there is none.
    """
    if op.kind != "compute":
        return Task(op, sink, earlier, None, 0)
    term = fold_term(op, sources)
    if term is not None:
        return Task(op, sink, earlier, term, size_of_a(term, sources))
    return Task(op, sink, earlier, None, _held(op, sources))


def _held(op: Op, sources: Mapping[str, Source]) -> int:
    from tasks.weights.execute.full_tensors import needs_full_tensor

    count = 2 * prod(op.read_shape) if needs_full_tensor(op) else 0
    for name in (name for term in op.terms for name in operands(term)):
        input_name, _, key = name.partition(":")
        count += prod(sources[input_name].tensors[key].shape)
    return 4 * count


class Pending:
    """Queue of tasks, the largest first, so that no worker starts a large one at the end.

    Tasks that need torch become available once it is imported; workers begin the others meanwhile.

    Args:
        tasks: all tasks.
        workers: number of workers that share them.
        lanes: largest number of tasks that a worker may have in progress.
    """

    def __init__(self, tasks: Iterable[Task], workers: int, lanes: int) -> None:
        ordered = sorted(tasks, key=lambda task: -task.op.nbytes)
        self._ready = [task for task in ordered if not task.needs_torch]
        self._later = [task for task in ordered if task.needs_torch]
        # Few tensors are spread over the workers rather than hashed side by side by one worker.
        self.lanes = max(1, min(lanes, -(-len(ordered) // workers)))
        self._large, self._closed = 0, False
        self._changed = threading.Condition()

    @property
    def waits_for_torch(self) -> bool:
        """True if tasks are held back until `torch_is_there` is called."""
        return bool(self._later)

    def torch_is_there(self) -> None:
        """Make the tasks that need torch available."""
        with self._changed:
            self._ready, self._later = [*self._ready, *self._later], []
            self._changed.notify_all()

    def close(self) -> None:
        """Drop all remaining tasks: a worker has failed, or the user has interrupted the run."""
        with self._changed:
            self._ready, self._later, self._closed = [], [], True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """True if `close` was called."""
        return self._closed

    def take(self, in_progress: int, memory: int) -> Task | None:
        """Return the next task for a worker; blocks only if the worker has nothing else to do.

        Args:
            in_progress: number of tasks that the worker has begun and not finished.
            memory: sum of their `Task.memory` in bytes.

        Returns:
            None if there is no task, or none that fits beside the worker's other tasks.
        """
        with self._changed:
            while True:
                for index, task in enumerate(self._ready):
                    if self._fits(task, in_progress, memory):
                        self._large += task.memory > LARGE
                        return self._ready.pop(index)
                if in_progress or not (self._ready or self._later):
                    return None
                self._changed.wait()

    def done(self, task: Task) -> None:
        """Mark a task that was taken as finished."""
        if task.memory > LARGE:
            with self._changed:
                self._large -= 1
                self._changed.notify_all()

    def _fits(self, task: Task, in_progress: int, memory: int) -> bool:
        if task.memory > LARGE:
            return not in_progress and self._large < _MAX_LARGE
        return in_progress < self.lanes and memory + task.memory <= LARGE
