"""Queue of the tensors still to be written."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from tasks.weights.execute.full_tensors import needs_full_tensor
from tasks.weights.execute.journal import Outcome
from tasks.weights.execute.lora_merge import fold_term, size_of_a
from tasks.weights.execute.sinks import Sink
from tasks.weights.files.dtype_conversion import casts
from tasks.weights.files.source import Source, info_of
from tasks.weights.plan.adapter_ops import LowRank, operands
from tasks.weights.plan.operations import Op

LARGE = 32 << 20
"""Memory in bytes from which on a tensor counts as large."""
_MAX_LARGE = 2
"""Number of workers that may handle a large tensor at the same time."""


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
    count = 2 * prod(op.read_shape) if needs_full_tensor(op) else 0
    names = (name for term in op.terms for name in operands(term))
    return 4 * (count + sum(prod(info_of(name, sources).shape) for name in names))


class Pending:
    """Queue of tasks, the largest first, so that no worker starts a large one at the end.

    Tasks that need torch become available once it is imported; workers begin the others meanwhile.

    Attributes:
        closed: True once `close` was called.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        ordered = sorted(tasks, key=lambda task: -task.op.nbytes)
        self._ready = [task for task in ordered if not task.needs_torch]
        self._later = [task for task in ordered if task.needs_torch]
        self._large = 0
        self.closed = False
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
            self._ready, self._later, self.closed = [], [], True
            self._changed.notify_all()

    def take(self) -> Task | None:
        """Return the next task; waits while there are only tasks that cannot start yet.

        Returns:
            None if there is no task left.
        """
        with self._changed:
            while self._ready or self._later:
                for index, task in enumerate(self._ready):
                    if task.memory <= LARGE or self._large < _MAX_LARGE:
                        self._large += task.memory > LARGE
                        return self._ready.pop(index)
                self._changed.wait()
            return None

    def done(self, task: Task) -> None:
        """Mark a task that was taken as finished."""
        if task.memory > LARGE:
            with self._changed:
                self._large -= 1
                self._changed.notify_all()
