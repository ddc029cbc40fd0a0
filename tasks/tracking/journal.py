"""Ordered journal of what a flow records in MLflow, on disk until MLflow has it.

    <outbox>/<time>-<id>/journal.jsonl     one record a line
                         delivered.json    how much of it MLflow has, and its ids of the runs
                         files/            texts and plots to upload

The owner of a journal holds a lock on it (`flock`), which the kernel releases when the process is
gone: a journal that can be locked belongs to a dead flow.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

MOST_VALUES = 500
"""Metrics of one request; MLflow allows 1000."""

Record = dict[str, Any]


def now() -> int:
    """Return the time in milliseconds, as MLflow counts it."""
    return int(time.time() * 1000)


class Journal:
    """Records of one flow.

    Args:
        folder: folder of the journal; created if it does not exist.

    Raises:
        BlockingIOError: a live process has the journal.
    """

    def __init__(self, folder: Path) -> None:
        (folder / "files").mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder = folder
        self._path, self._state = folder / "journal.jsonl", folder / "delivered.json"
        # Unbuffered, so that a record is on disk or not there at all if the process is killed.
        self._file = self._path.open("ab", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise
        known = json.loads(self._state.read_text()) if self._state.is_file() else {}
        self.sent: int = known.get("sent", 0)
        self.refused: int = known.get("refused", 0)
        self.runs: dict[str, str] = known.get("runs", {})
        self._files = 0

    def append(self, record: Record) -> None:
        """Write one record."""
        self._file.write((json.dumps(record, default=str) + "\n").encode())

    def new_file(self, name: str) -> Path:
        """Return the path for a new file of this name, to be uploaded."""
        self._files += 1
        path = self.folder / "files" / f"{self._files}-{uuid.uuid4().hex[:6]}" / name
        path.parent.mkdir(parents=True)
        return path

    def records(self, start: int = 0) -> Iterator[tuple[Record, int]]:
        """Yield the records from an offset on, each with the offset of its end."""
        with self._path.open("rb") as file:
            file.seek(start)
            for line in file:
                start += len(line)
                if not line.endswith(b"\n"):
                    return  # being written, or cut off by a power failure
                with contextlib.suppress(ValueError):
                    yield json.loads(line), start

    def batches(self) -> Iterator[tuple[list[Record], int]]:
        """Yield the records that are not delivered; metrics of a run that are neighbours as one."""
        batch: list[Record] = []
        end = self.sent
        for record, offset in self.records(self.sent):
            if batch and not _joins(batch, record):
                yield batch, end
                batch = []
            batch.append(record)
            end = offset
        if batch:
            yield batch, end

    def delivered(self, end: int) -> None:
        """Note that MLflow has everything up to an offset."""
        self.sent = end
        fresh = self._state.with_suffix(".new")
        state = {"sent": end, "refused": self.refused, "runs": self.runs}
        fresh.write_text(json.dumps(state))
        fresh.replace(self._state)

    def end_runs(self) -> None:
        """Append an end as KILLED for each run without one; the flow of this journal is dead."""
        open_runs: list[str] = []
        last = 0
        for record, _ in self.records():
            last = max(last, record.get("at", 0))
            if record["do"] == "start":
                open_runs.append(record["run"])
            elif record["do"] == "end" and record["run"] in open_runs:
                open_runs.remove(record["run"])
        with self._path.open("rb+") as file:  # half a record at the end would swallow the next
            text = file.read()
            file.truncate(text.rfind(b"\n") + 1)
        for run in reversed(open_runs):
            self.append({"do": "end", "run": run, "status": "KILLED", "at": last})

    def size(self) -> int:
        """Return the offset of the end; 0 once the journal is closed, since all was delivered."""
        return 0 if self._file.closed else os.fstat(self._file.fileno()).st_size

    def waiting(self) -> int:
        """Return the number of records that are not delivered."""
        if not self._path.is_file():  # `close` has removed it, since all were delivered
            return 0
        return sum(1 for _ in self.records(self.sent))

    def close(self) -> None:
        """Release the journal; remove it if everything is delivered."""
        if not self.waiting():
            shutil.rmtree(self.folder, ignore_errors=True)
        self._file.close()


def _joins(batch: list[Record], record: Record) -> bool:
    same = (batch[-1]["do"], batch[-1]["run"]) == (record["do"], record["run"])
    is_metrics = same and record["do"] == "metrics"
    return is_metrics and sum(len(r["values"]) for r in [*batch, record]) <= MOST_VALUES


def new_journal(folder: Path, server: str) -> Journal:
    """Create a journal in the folder of journals, with a header about its owner."""
    while True:
        path = folder / f"{datetime.now():%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            journal = Journal(path)
            if path.is_dir():  # another run has not taken the empty journal for that of a dead one
                break
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "at": now()}
    journal.append({"do": "open", "run": "", "server": server, **owner})
    return journal


def left_behind(folder: Path, server: str) -> Iterator[Journal]:
    """Yield the journals of dead flows for a server, oldest first; their runs are ended."""
    for path in sorted(folder.glob("*/journal.jsonl")):
        try:
            journal = Journal(path.parent)
        except (BlockingIOError, ValueError):
            continue  # of a live flow
        header = next(journal.records(), ({"server": server}, 0))[0]
        if header.get("server") != server:
            log.warning(
                "%s has records for MLflow at %s: a run with that tracking.uri delivers them",
                path.parent, header.get("server"),
            )  # fmt: skip
            journal.close()
            continue
        journal.end_runs()
        yield journal
