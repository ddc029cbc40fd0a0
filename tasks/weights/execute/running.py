"""One run of a plan: open its files, start the workers that fill them, handle failures."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from tasks.weights.execute.copying import known_hash, link_or_copy
from tasks.weights.execute.journal import Journal, Outcome
from tasks.weights.execute.sinks import Sink, prepare_file
from tasks.weights.execute.task_queue import Pending, Task, make_task
from tasks.weights.execute.worker_threads import Done, Worker
from tasks.weights.execute.writer import require_space
from tasks.weights.files.source import Source
from tasks.weights.plan.layout import OutFile


@dataclass
class Run:
    """One run of a plan whose files are laid out.

    Attributes:
        sources: inputs of the plan by name.
        out: the output folder.
        files: files to write or to link.
        journal: tensors that an earlier run finished; gets those of this run.
        scan: inspect copied values too.
        outcomes: finished tensors by name.
        resumed: number of tensors that an earlier run had finished.
        read: bytes of tensor data that this process read; kernel copies are not counted.
        written: bytes of tensor data that this process wrote.
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
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def to_end(self, workers: int) -> None:
        """Write or link every file. Raises ArtifactError if an input or output fails."""
        self._remove_foreign()
        written = [file for file in self.files if file.link is None]
        missing = [f for f in written if not (self.out / f.name).exists()]
        require_space(self.out, sum(file.file.size for file in missing))
        for file in self.files:
            if file.link is not None:
                self._link(file, file.link)
        with contextlib.ExitStack() as handles:
            tasks = [task for file in written for task in self._open(file, handles)]
            self._work(Pending(tasks), workers)

    def remove_files(self) -> None:
        """Delete every file that this run may have written."""
        for file in self.files:
            (self.out / file.name).unlink(missing_ok=True)

    def _remove_foreign(self) -> None:
        """Delete weight files of an earlier run that this run cannot continue."""
        own = {file.name for file in self.files} if self.journal.recorded else set()
        for path in self.out.glob("*.safetensors"):
            if path.name not in own:
                path.unlink()

    def _link(self, file: OutFile, source: Path) -> None:
        link_or_copy(source, self.out / file.name)
        for op in file.ops:
            self.outcomes[op.name] = Outcome(
                op.name, file.name, str(known_hash(op, self.sources)), all_zero=None
            )

    def _open(self, file: OutFile, handles: contextlib.ExitStack) -> Iterator[Task]:
        path = self.out / file.name
        handle, begun = prepare_file(path, file.file)
        handles.callback(os.close, handle)
        for op in file.ops:
            earlier = self.journal.recorded.get(op.name) if begun else None
            sink = Sink(handle, path, file.file.infos[op.name])
            yield make_task(op, self.sources, sink, earlier)

    def _work(self, pending: Pending, workers: int) -> None:
        def work() -> None:
            Worker(pending, self.sources, self.scan, self._finish).run()

        with ThreadPoolExecutor(workers, thread_name_prefix="weights") as pool:
            try:
                futures = [pool.submit(work) for _ in range(workers)]
                needs_torch = pending.waits_for_torch
                with _single_threaded_torch() if needs_torch else contextlib.nullcontext():
                    pending.torch_is_there()
                    _wait(futures)
            except BaseException:
                pending.close()
                raise

    def _finish(self, done: Done) -> None:
        if not done.resumed:
            self.journal.enter(done.outcome)
        with self._lock:
            self.outcomes[done.outcome.name] = done.outcome
            self.read, self.written = self.read + done.read, self.written + done.written
            self.resumed += done.resumed


@contextlib.contextmanager
def _single_threaded_torch() -> Iterator[None]:
    """Run torch operations on one thread each: the workers provide the parallelism.

    Otherwise every worker would start its own thread pool, and the pools would compete for cores.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _wait(futures: Sequence[Future[None]]) -> None:
    finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in finished:
        future.result()
