"""Worker thread: writes several tensors side by side, block by block, to hash them together.

Each round makes the next block of every tensor in progress, hashes all blocks at once and writes
them. The choice of tensors in a round does not affect their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tasks.weights.execute.compute import compute, matrix_shape
from tasks.weights.execute.copying import (
    Buffer,
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
from tasks.weights.native.hashing import Stream, advance, stream


@dataclass(frozen=True)
class Done:
    """One finished tensor, and the bytes of tensor data that were read and written for it."""

    outcome: Outcome
    read: int = 0
    written: int = 0
    resumed: bool = False


@dataclass(frozen=True)
class Block:
    """Bytes to hash and to write; `sink` is None if they are only read back to be verified."""

    raw: NDArray[np.uint8]
    stream: Stream
    sink: Sink | None


Steps = Generator[Block, None, Done]


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
    _lanes: list[_Lane] = field(default_factory=list)
    _free: list[Workspace] = field(default_factory=list)

    def __post_init__(self) -> None:
        read = Buffer()
        self._free = [Workspace(read) for _ in range(self.pending.lanes)]

    def run(self) -> None:
        """Write tensors until the queue is empty or closed."""
        try:
            while not self.pending.closed and self._begin():
                self._round()
        except BaseException:
            self.pending.close()
            raise
        finally:
            for lane in self._lanes:
                lane.steps.close()

    def _begin(self) -> bool:
        """Take tasks that fit. Returns True if there is any tensor in progress."""
        while len(self._lanes) < self.pending.lanes:
            memory = sum(lane.task.memory for lane in self._lanes)
            task = self.pending.take(len(self._lanes), memory)
            if task is None:
                break
            workspace = self._free.pop()
            self._lanes.append(_Lane(task, workspace, self._steps(task, workspace)))
        return bool(self._lanes)

    def _round(self) -> None:
        made = [(lane, block) for lane in list(self._lanes) if (block := self._next(lane))]
        advance([(block.stream, block.raw) for _, block in made])
        for lane, block in made:
            if block.sink is None:
                continue
            block.sink.write(block.raw)
            if block.sink.complete:
                # Entered at once, not a round later: a finished tensor is then never lost.
                block.sink.start_flush()
                surplus = self._next(lane)
                assert surplus is None, f"{lane.task.op.name}: more bytes than its shape says"

    def _next(self, lane: _Lane) -> Block | None:
        try:
            return next(lane.steps)
        except StopIteration as end:
            self.finish(end.value)
            self._lanes.remove(lane)
            self._free.append(lane.workspace)
            self.pending.done(lane.task)
            return None

    def _steps(self, task: Task, workspace: Workspace) -> Steps:
        if task.earlier is not None:
            sink, check = task.sink, stream()
            for raw in contents(sink.path, sink.info, workspace):
                yield Block(raw, check, None)
            if check.hexdigest() == task.earlier.sha256:
                return Done(task.earlier, read=sink.info.nbytes, resumed=True)
        steps = self._compute if task.op.kind == "compute" else self._move
        return (yield from steps(task, workspace))

    def _move(self, task: Task, workspace: Workspace) -> Steps:
        op, sink = task.op, task.sink
        moved = None if self.scan else offload(op, self.sources, sink)
        if moved is not None:
            sink.start_flush()
            return Done(moved)
        seen = Seen()
        for raw in move(op, self.sources, workspace, seen):
            yield Block(raw, sink.stream, sink)
        sha256 = same_as_known(op, self.sources, sink.sha256())
        outcome = Outcome(op.name, sink.path.name, sha256, seen.nonfinite, seen.all_zero)
        return Done(outcome, seen.read, op.nbytes)

    def _compute(self, task: Task, workspace: Workspace) -> Steps:
        op, sink, measured = task.op, task.sink, Measured()
        if task.fold is not None:
            blocks = fold(op, task.fold, self.sources, workspace, measured)
        else:
            blocks = compute(op, self.sources, measured)
        for raw in blocks:
            yield Block(raw, sink.stream, sink)
        rows, columns = matrix_shape(op.shape)
        outcome = Outcome(
            op.name,
            sink.path.name,
            sink.sha256(),
            nonfinite=measured.nonfinite,
            changed=measured.changed / (rows * columns) if op.terms else None,
            error=measured.error if op.terms else None,
            delta=measured.delta,
        )
        return Done(outcome, read=op.nbytes, written=op.nbytes)


@dataclass(frozen=True)
class _Lane:
    task: Task
    workspace: Workspace
    steps: Steps
