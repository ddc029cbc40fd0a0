"""The workers of `execute.py`: who does which tensor, when, and what happens when one fails."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from tasks.weights.blocks import matrix_shape
from tasks.weights.casts import casts
from tasks.weights.copying import (
    Sink,
    StoppedError,
    known_hash,
    link_or_copy,
    move,
    prepare_file,
    same_contents,
)
from tasks.weights.journal import Journal, Outcome
from tasks.weights.layout import OutFile
from tasks.weights.plan import Op
from tasks.weights.source import Source
from tasks.weights.writer import require_space


@dataclass(frozen=True)
class _Done:
    """One finished tensor; bytes of tensor data that this process has read and written for it."""

    outcome: Outcome
    read: int = 0
    written: int = 0
    resumed: bool = False


@dataclass
class Run:
    """One run of a plan whose files are laid out.

    Attributes:
        sources: inputs by name.
        out: the folder.
        files: what to write or link.
        journal: what an earlier run has finished, and what this one finishes.
        scan: look at copied values too.
        outcomes: finished tensors by name.
        resumed: how many of them an earlier run had finished.
        read: bytes of tensor data this process has read; kernel copies are not counted.
        written: bytes of tensor data it has written.
    """

    sources: Mapping[str, Source]
    out: Path
    files: Sequence[OutFile]
    journal: Journal
    scan: bool
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    resumed: int = 0
    read: int = 0
    written: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def to_end(self, workers: int) -> None:
        """Make every file. Raises ArtifactError."""
        self._remove_foreign()
        written = [file for file in self.files if file.link is None]
        missing = [f for f in written if not (self.out / f.name).exists()]
        require_space(self.out, sum(file.file.size for file in missing))
        for file in self.files:
            if file.link is not None:
                self._link(file, file.link)
        with contextlib.ExitStack() as handles:
            tasks = [task for file in written for task in self._open(file, handles)]
            for done in self._work(tasks, workers):
                self.outcomes[done.outcome.name] = done.outcome
                self.read, self.written = self.read + done.read, self.written + done.written
                self.resumed += done.resumed

    def remove_files(self) -> None:
        """Leave nothing of what this run may have written."""
        for file in self.files:
            (self.out / file.name).unlink(missing_ok=True)

    def _remove_foreign(self) -> None:
        """Weight files that an earlier run left and this one cannot go on with."""
        own = {file.name for file in self.files} if self.journal.found else set()
        for path in self.out.glob("*.safetensors"):
            if path.name not in own:
                path.unlink()

    def _link(self, file: OutFile, source: Path) -> None:
        link_or_copy(source, self.out / file.name)
        for op in file.ops:
            self.outcomes[op.name] = Outcome(
                op.name, file.name, str(known_hash(op, self.sources)), all_zero=None
            )

    def _open(self, file: OutFile, handles: contextlib.ExitStack) -> Iterator[_Task]:
        path = self.out / file.name
        handle, begun = prepare_file(path, file.file)
        handles.callback(os.close, handle)
        for op in file.ops:
            earlier = self.journal.found.get(op.name) if begun else None
            yield _Task(op, Sink(handle, path, file.file.infos[op.name], self._stop), earlier)

    def _work(self, tasks: Sequence[_Task], workers: int) -> list[_Done]:
        """Longest first, and what needs no torch before the rest: torch is imported meanwhile."""
        ordered = sorted(tasks, key=lambda task: (task.needs_torch, -task.op.nbytes))
        light = [task for task in ordered if not task.needs_torch]
        heavy = [task for task in ordered if task.needs_torch]
        with ThreadPoolExecutor(workers, thread_name_prefix="weights") as pool:
            try:
                futures = [pool.submit(self._do, task) for task in light]
                with _single_threaded_torch() if heavy else contextlib.nullcontext():
                    futures += [pool.submit(self._do, task) for task in heavy]
                    _wait(futures)
            except BaseException:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        return [future.result() for future in futures]

    def _do(self, task: _Task) -> _Done:
        if self._stop.is_set():
            raise StoppedError
        sink, earlier = task.sink, task.earlier
        if earlier is not None and same_contents(sink.path, sink.info, earlier.sha256, self._stop):
            return _Done(earlier, read=sink.info.nbytes, resumed=True)
        done = self._compute(task) if task.op.kind == "compute" else self._move(task)
        self.journal.enter(done.outcome)
        return done

    def _move(self, task: _Task) -> _Done:
        outcome, read = move(task.op, self.sources, task.sink, scan=self.scan)
        return _Done(outcome, read, task.op.nbytes if read else 0)

    def _compute(self, task: _Task) -> _Done:
        from tasks.weights.compute import compute

        op = task.op
        found = compute(op, self.sources, task.sink.put)
        rows, columns = matrix_shape(op.shape)
        outcome = Outcome(
            op.name,
            task.sink.path.name,
            task.sink.sha256(),
            nonfinite=found.nonfinite,
            changed=found.changed / (rows * columns) if op.terms else None,
            error=found.error if op.terms else None,
            delta=found.delta,
        )
        return _Done(outcome, read=op.nbytes, written=op.nbytes)


@dataclass(frozen=True)
class _Task:
    op: Op
    sink: Sink
    earlier: Outcome | None

    @property
    def needs_torch(self) -> bool:
        if self.op.kind == "cast":
            return not casts(self.op.source_dtype, self.op.dtype)
        return self.op.kind == "compute"


@contextlib.contextmanager
def _single_threaded_torch() -> Iterator[None]:
    """torch with one thread an operation: the workers are the parallelism.

    With more, every worker would start a team of its own, and all of them would wait for cores.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _wait(futures: Sequence[Future[_Done]]) -> None:
    """Until all are done, or one has failed: then with its error."""
    finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in finished:
        future.result()
