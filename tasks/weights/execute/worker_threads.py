"""A worker: several tensors side by side, block by block, so that their hashes run in lanes.

A round makes the next block of every tensor in hand, hashes all of them at once, and writes them.
Which tensors meet in a round changes no byte of any of them.
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
    """One finished tensor; bytes of tensor data that this process has read and written for it."""

    outcome: Outcome
    read: int = 0
    written: int = 0
    resumed: bool = False


@dataclass(frozen=True)
class Block:
    """Bytes to be hashed, and written unless they only verify what is there."""

    raw: NDArray[np.uint8]
    stream: Stream
    sink: Sink | None


Steps = Generator[Block, None, Done]


@dataclass
class Worker:
    """One thread's work.

    Attributes:
        pending: where tasks come from.
        sources: inputs by name.
        scan: look at copied values too.
        finish: takes every finished tensor at once.
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
        """Until nothing is left, or somebody has closed what is pending."""
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
        """Take what fits. Returns whether there is anything to do."""
        while len(self._lanes) < self.pending.lanes:
            held = sum(lane.task.held for lane in self._lanes)
            task = self.pending.take(len(self._lanes), held)
            if task is None:
                break
            room = self._free.pop()
            self._lanes.append(_Lane(task, room, self._steps(task, room)))
        return bool(self._lanes)

    def _round(self) -> None:
        made = [(lane, block) for lane in list(self._lanes) if (block := self._next(lane))]
        advance([(block.stream, block.raw) for _, block in made])
        for lane, block in made:
            if block.sink is None:
                continue
            block.sink.write(block.raw)
            if block.sink.complete:
                # Entered at once, not a round later: what is written is then never lost.
                block.sink.start_flush()
                over = self._next(lane)
                assert over is None, f"{lane.task.op.name}: more bytes than its shape says"

    def _next(self, lane: _Lane) -> Block | None:
        try:
            return next(lane.steps)
        except StopIteration as end:
            self.finish(end.value)
            self._lanes.remove(lane)
            self._free.append(lane.room)
            self.pending.done(lane.task)
            return None

    def _steps(self, task: Task, room: Workspace) -> Steps:
        if task.earlier is not None:
            sink, check = task.sink, stream()
            for raw in contents(sink.path, sink.info, room):
                yield Block(raw, check, None)
            if check.hexdigest() == task.earlier.sha256:
                return Done(task.earlier, read=sink.info.nbytes, resumed=True)
        steps = self._compute if task.op.kind == "compute" else self._move
        return (yield from steps(task, room))

    def _move(self, task: Task, room: Workspace) -> Steps:
        op, sink = task.op, task.sink
        moved = None if self.scan else offload(op, self.sources, sink)
        if moved is not None:
            sink.start_flush()
            return Done(moved)
        seen = Seen()
        for raw in move(op, self.sources, room, seen):
            yield Block(raw, sink.stream, sink)
        found = same_as_known(op, self.sources, sink.sha256())
        outcome = Outcome(op.name, sink.path.name, found, seen.nonfinite, seen.all_zero)
        return Done(outcome, seen.read, op.nbytes)

    def _compute(self, task: Task, room: Workspace) -> Steps:
        op, sink, found = task.op, task.sink, Measured()
        if task.fold is not None:
            blocks = fold(op, task.fold, self.sources, room, found)
        else:
            blocks = compute(op, self.sources, found)
        for raw in blocks:
            yield Block(raw, sink.stream, sink)
        rows, columns = matrix_shape(op.shape)
        outcome = Outcome(
            op.name,
            sink.path.name,
            sink.sha256(),
            nonfinite=found.nonfinite,
            changed=found.changed / (rows * columns) if op.terms else None,
            error=found.error if op.terms else None,
            delta=found.delta,
        )
        return Done(outcome, read=op.nbytes, written=op.nbytes)


@dataclass(frozen=True)
class _Lane:
    task: Task
    room: Workspace
    steps: Steps
