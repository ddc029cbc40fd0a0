"""Worker thread: takes tensors from the queue and writes each, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from tasks.weights.execute.compute import compute, matrix_shape
from tasks.weights.execute.copying import (
    Seen,
    Workspace,
    contents,
    move,
    offload,
    same_as_known,
)
from tasks.weights.execute.journal import Measured, Outcome
from tasks.weights.execute.lora_merge import fold
from tasks.weights.execute.sinks import Sink
from tasks.weights.execute.task_queue import Pending, Task
from tasks.weights.files.source import Source


@dataclass(frozen=True)
class Done:
    """One finished tensor, and the bytes of tensor data that were read and written for it."""

    outcome: Outcome
    read: int = 0
    written: int = 0
    resumed: bool = False


class _Closed(Exception):
    """The queue was closed while a tensor was written."""


@dataclass
class Worker:
    """Work of one thread.

    Attributes:
        pending: queue of tasks.
        sources: inputs of the plan by name.
        scan: inspect copied values too.
        finish: called with every finished tensor.
    """

    pending: Pending
    sources: Mapping[str, Source]
    scan: bool
    finish: Callable[[Done], None]
    _workspace: Workspace = field(default_factory=Workspace)

    def run(self) -> None:
        """Write tensors until the queue is empty or closed."""
        try:
            while (task := self.pending.take()) is not None:
                self.finish(self._written(task))
                self.pending.done(task)
        except _Closed:
            return
        except BaseException:
            self.pending.close()
            raise

    def _written(self, task: Task) -> Done:
        if task.earlier is not None:
            sink, check = task.sink, blake3()
            for raw in contents(sink.path, sink.info, self._workspace):
                check.update(raw)
            if check.hexdigest() == task.earlier.checksum:
                return Done(task.earlier, read=sink.info.nbytes, resumed=True)
        return self._compute(task) if task.op.kind == "compute" else self._move(task)

    def _write(self, sink: Sink, blocks: Iterable[NDArray[np.uint8]]) -> None:
        """Write a tensor's blocks, unless the queue is closed meanwhile."""
        for raw in blocks:
            if self.pending.closed:
                raise _Closed
            sink.write(raw)
        sink.start_flush()

    def _move(self, task: Task) -> Done:
        op, sink = task.op, task.sink
        moved = None if self.scan else offload(op, self.sources, sink)
        if moved is not None:
            sink.start_flush()
            return Done(moved)
        seen = Seen()
        self._write(sink, move(op, self.sources, self._workspace, seen))
        checksum = same_as_known(op, self.sources, sink.checksum())
        outcome = Outcome(op.name, sink.path.name, checksum, seen.nonfinite, seen.all_zero)
        return Done(outcome, seen.read, op.nbytes)

    def _compute(self, task: Task) -> Done:
        op, sink, measured = task.op, task.sink, Measured()
        if task.fold is not None:
            blocks = fold(op, task.fold, self.sources, self._workspace, measured)
        else:
            blocks = compute(op, self.sources, measured)
        self._write(sink, blocks)
        rows, columns = matrix_shape(op.shape)
        outcome = Outcome(
            op.name,
            sink.path.name,
            sink.checksum(),
            nonfinite=measured.nonfinite,
            changed=measured.changed / (rows * columns) if op.terms else None,
            error=measured.error if op.terms else None,
            delta=measured.delta if op.terms else None,
            kept=measured.kept if op.terms else None,
            nearest=measured.nearest if op.terms else None,
        )
        return Done(outcome, read=op.nbytes, written=op.nbytes)
