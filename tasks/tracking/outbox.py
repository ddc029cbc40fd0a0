"""Deliver what a flow records in MLflow from a thread, so that the flow never waits for it.

A record that MLflow has not confirmed is sent again, if need be by the next flow that uses the
folder. Sending twice changes nothing: MLflow drops a metric with the same step, time and value, and
runs are found again by a tag.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tasks.core.redaction import redact
from tasks.tracking.journal import Journal, Record, left_behind, new_journal

log = logging.getLogger(__name__)

POLL_S = 2.0
"""Seconds between two deliveries: metrics of several steps are one request."""
PAUSE_S = 5.0
"""Seconds after a failed delivery."""

Send = Callable[[list[Record], dict[str, str], Path], None]
"""(records of one run, MLflow's ids by ours, folder of the journal) -> nothing. Adds new ids."""


class UnreachableError(Exception):
    """MLflow does not answer: the records stay in the journal."""


class RefusedError(Exception):
    """MLflow answers that a record is invalid: it is left out."""


class Outbox:
    """Journal of one flow, and the thread that delivers it and those of dead flows.

    Args:
        server: the server without its password, for messages and for the next flow.
    """

    def __init__(self, folder: Path, server: str, send: Send) -> None:
        self._server, self._send = server, send
        self._left = list(left_behind(folder, server))
        self._journal = new_journal(folder, server)
        self._changed = threading.Condition()
        self._is_asked = self._is_closing = False
        self._begun = self._ended = 0
        self.problem = ""
        """Why the last delivery failed; empty if it did not."""
        self._is_full = False
        self._thread = threading.Thread(target=self._work, name="mlflow outbox", daemon=True)
        self._thread.start()

    def put(self, **record: Any) -> None:
        """Add a record. Never raises: a run is worth more than its metrics."""
        with self._no_space():
            self._journal.append(record)

    def put_file(self, run: str, name: str, write: Callable[[Path], object]) -> None:
        """Add a file to upload."""
        with self._no_space():
            path = self._journal.new_file(Path(name).name)
            write(path)
            if path.is_file():
                file = str(path.relative_to(self._journal.folder))
                self._journal.append({"do": "file", "run": run, "path": name, "file": file})

    @contextlib.contextmanager
    def _no_space(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._is_full:
                log.warning("records for MLflow are lost: %s: %s", self._journal.folder, error)
            self._is_full = True

    def run_id(self, run: str) -> str:
        """Return MLflow's id of a run; empty if MLflow has not got the run yet."""
        return self._journal.runs.get(run, "")

    def wait(self, limit_s: float) -> bool:
        """Wait until one delivery has been tried. Returns True if MLflow has all earlier records.

        After `close` it does not wait: the summary of a failed flow asks then.
        """
        end = self._journal.size()  # another thread samples the machine's load meanwhile
        with self._changed:
            if not self._is_closing:
                wanted, self._is_asked = self._begun + 1, True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._ended >= wanted, limit_s)
        return not self.problem and self._journal.sent >= end

    def report(self) -> str:
        """Return a line about what MLflow has not recorded; empty if it has everything."""
        if self.problem:
            return (
                f"MLflow at {self._server} does not answer ({self.problem}): "
                f"{self._journal.waiting()} records wait in {self._journal.folder}; the next run "
                "with the same paths.runs and tracking.uri delivers them"
            )
        if self._journal.refused:
            return f"MLflow has refused {self._journal.refused} records; see the log of the run"
        return "records for MLflow were lost: the disk is full" if self._is_full else ""

    def close(self, limit_s: float) -> None:
        """Deliver what is left, and end the thread."""
        was_down = bool(self.problem)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(limit_s)
        if self.problem and not was_down:
            log.warning("%s", self.report())

    def _work(self) -> None:
        is_last = False
        while not is_last:
            with self._changed:
                pause = PAUSE_S if self.problem else POLL_S
                self._changed.wait_for(lambda: self._is_asked or self._is_closing, pause)
                is_last, self._is_asked = self._is_closing, False
                self._begun += 1
            self._deliver_all()
            with self._changed:
                self._ended += 1
                self._changed.notify_all()
        for journal in (self._journal, *self._left):
            journal.close()

    def _deliver_all(self) -> None:
        try:
            self._deliver(self._journal)
        except Exception as error:  # a full disk, too: the thread must live as long as the flow
            reason = _reason(error)
            if not self.problem:
                log.warning(
                    "MLflow at %s does not answer (%s). The run goes on; its records are kept in "
                    "%s and delivered when the server is back, or by the next run",
                    self._server, reason, self._journal.folder,
                )  # fmt: skip
            self.problem = reason
            return
        if self.problem:
            log.warning("MLflow at %s answers again; all records are delivered", self._server)
        self.problem = ""
        while self._left:
            try:
                self._deliver(self._left[0])
            except Exception:  # it waits for the next flow
                return
            self._left.pop(0).close()

    def _deliver(self, journal: Journal) -> None:
        for batch, end in journal.batches():
            try:
                if batch[0]["do"] != "open":
                    self._send(batch, journal.runs, journal.folder)
            except RefusedError as error:
                if not journal.refused:
                    log.warning("MLflow refuses a record, which is left out: %s", error)
                journal.refused += len(batch)
            journal.delivered(end)


def _reason(error: BaseException) -> str:
    """Return an error in one line: that of the database, without the SQL that SQLAlchemy adds."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line for line in lines if "Error) " in line), lines[0])


_LATER = (401, 403, 408, 429)
"""Client errors that do not mean that a record is invalid."""


@contextlib.contextmanager
def errors_of_mlflow() -> Iterator[None]:
    """Turn any error of MLflow into `UnreachableError` or `RefusedError`, without passwords."""
    try:
        yield
    except (UnreachableError, RefusedError):
        raise
    except Exception as error:
        status = _status(error)
        text = redact(str(error)).strip().splitlines() or [type(error).__name__]
        if status is None or status >= 500 or status in _LATER:
            raise UnreachableError(_cause(text[0], status)) from None
        raise RefusedError(text[0][:300]) from None


def _status(error: Exception) -> int | None:
    """Return the HTTP status of an error; None if there was no answer, 400 for our own errors."""
    if hasattr(error, "get_http_status_code"):  # an MlflowException
        return int(error.get_http_status_code())
    response = getattr(error, "response", None)
    if response is not None:
        return int(response.status_code)
    outside = isinstance(error, OSError) or type(error).__module__.startswith("sqlalchemy")
    return None if outside else 400


def _cause(text: str, status: int | None) -> str:
    """Return the cause in a few words; texts of MLflow and requests quote it inside of theirs."""
    for cause, words in (
        ("refused", "nothing listens there"),
        ("timed out", "no answer in time"),
        ("timeout", "no answer in time"),
        ("resolve", "there is no host of that name"),
        ("aborted", "it has closed the connection"),
        ("reset", "it has closed the connection"),
        ("disk is full", "the disk is full"),
    ):
        if cause in text.lower():
            return words
    if status in _LATER:
        return f"status {status}: {text[:120]}"
    return text[:200]
