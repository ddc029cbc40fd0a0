"""Send what a flow records to MLflow from a thread, so that the flow never waits for it.

Records wait in memory. What MLflow has not confirmed is sent again while the flow lives. Sending
twice changes nothing: MLflow drops a metric with the same step, time and value, and runs are found
again by a tag.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from tasks.core.redaction import redact

log = logging.getLogger(__name__)

MOST_VALUES = 500
"""Metrics of one request; MLflow allows 1000."""
POLL_S = 2.0
"""Seconds between two deliveries: metrics of several steps are one request."""
PAUSE_S = 5.0
"""Seconds after a failed delivery."""


@dataclass(frozen=True)
class Record:
    """A call of MLflow's client for a run: its name, our id of the run, further arguments.

    `start` and `log_inputs` take fields that MLflow's thread makes an object of. A metric is its
    name, value, time and step.
    """

    call: str
    run: str
    arguments: tuple[Any, ...] = ()


METRICS = "log_metrics"
Send = Callable[[list[Record], dict[str, str]], None]
"""(records of one run, MLflow's ids by ours) -> nothing. Adds new ids."""


class UnreachableError(Exception):
    """MLflow does not answer: the records wait."""


class RefusedError(Exception):
    """MLflow answers that a record is invalid: it is left out."""


class Outbox:
    """Records of one flow, and the thread that sends them; without `send` they are dropped.

    `server` has no password; in `reports` the flow leaves its numbers in any case.
    """

    def __init__(self, server: str, send: Send | None, reports: Path) -> None:
        self._server, self._send, self._reports = server, send, reports
        self._waiting: deque[Record] = deque()
        self.runs: dict[str, str] = {}
        """MLflow's ids of runs by ours."""
        self.problem = ""
        """Why the last delivery failed; empty if it did not."""
        self._refused = 0
        self._changed = threading.Condition()
        self._asked = self._done = 0  # deliveries that somebody waits for
        self._is_closing = send is None
        self._thread = threading.Thread(target=self._work, name="mlflow outbox", daemon=True)
        if send is not None:
            self._thread.start()

    def put(self, call: str, run: str, *arguments: Any) -> None:
        """Add a record."""
        if self._send is not None:
            self._waiting.append(Record(call, run, arguments))

    def wait(self, limit_s: float) -> bool:
        """Wait until one delivery has been tried. Returns True if MLflow has all records.

        After `close` it does not wait: the summary of a failed flow asks then.
        """
        with self._changed:
            if not self._is_closing:
                self._asked = asked = self._asked + 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._done >= asked, limit_s)
        return not self._waiting

    def report(self) -> str:
        """Return a line about what MLflow has not recorded; empty if it has everything."""
        if waiting := len(self._waiting):
            return (
                f"MLflow at {self._server} has not got {waiting} records "
                f"({self.problem or 'it is too slow'}); the numbers are in {self._reports}"
            )
        return f"MLflow has refused {self._refused} records" if self._refused else ""

    def close(self, limit_s: float) -> None:
        """Send what is left, and end the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._send is not None:
            self._thread.join(limit_s)
        if report := self.report():
            log.warning("%s", report)

    def _work(self) -> None:
        is_last = False
        while not is_last:
            with self._changed:
                pause = PAUSE_S if self.problem else POLL_S
                self._changed.wait_for(
                    lambda: self._asked > self._done or self._is_closing, timeout=pause
                )
                is_last, asked = self._is_closing, self._asked
            try:
                while self._waiting:
                    self._deliver()
                self.problem = ""
            except Exception as error:  # the thread must live as long as the flow
                if not self.problem:
                    what = "MLflow at %s does not answer (%s). The run goes on, and sends it later"
                    log.warning(what, self._server, reason(error))
                self.problem = reason(error)
            with self._changed:
                self._done = asked
                self._changed.notify_all()

    def _deliver(self) -> None:
        """Send the oldest record; of a metric, also those of the same run that follow."""
        first = self._waiting[0]
        count = min(len(self._waiting), MOST_VALUES) if first.call == METRICS else 1
        oldest = [self._waiting[at] for at in range(count)]  # a copy: the flow adds at the end
        batch = list(
            takewhile(lambda each: (each.call, each.run) == (first.call, first.run), oldest)
        )
        try:
            assert self._send is not None
            self._send(batch, self.runs)
        except RefusedError as error:
            log.warning("MLflow refuses a record, which is left out: %s", error)
            self._refused += len(batch)
        for _ in batch:
            self._waiting.popleft()


def reason(error: BaseException) -> str:
    """Return an error in one line: that of the database, without the SQL that SQLAlchemy adds."""
    lines = redact(str(error)).splitlines() or [type(error).__name__]
    return next((line for line in lines if "Error) " in line), lines[0])
