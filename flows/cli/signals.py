"""End a command by Ctrl-C, SIGTERM and SIGHUP: clean up first, then the exit status that is usual.

Signals need care because of Prefect. It turns a SIGTERM into an exception inside a flow, and then
sends the signal once more, to the handler that was there before. The default handler would end the
process before the flow run is reported, and the run would stay `Running` for ever. With our handler
it is reported as crashed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

HUNG_UP, INTERRUPTED, TERMINATED = 129, 130, 143
"""Exit statuses after SIGHUP, SIGINT and SIGTERM."""
SETTLE_S = 10.0
"""Seconds after a first signal in which further ones are ignored: time for cleaning up."""
LEAVE_S = 15.0
"""Seconds from the end of a stopped flow to that of the process, even if a server hangs."""


class _Received:
    """Signal handlers, and the exit status that belongs to the first signal."""

    def __init__(self) -> None:
        self.status: int | None = None
        self._at = 0.0

    def _first(self, status: int) -> bool:
        now = time.monotonic()
        if self.status is not None and now - self._at < SETTLE_S:
            return False
        if self.status is None:  # the supervisors end all child processes when this one is gone
            leave = threading.Timer(LEAVE_S, os._exit, [status])
            leave.daemon = True
            leave.start()
        self.status, self._at = self.status or status, now
        return True

    def on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._first(INTERRUPTED):
            raise KeyboardInterrupt(INTERRUPTED)

    def on_hangup(self, number: int, frame: FrameType | None) -> None:
        if self._first(HUNG_UP):
            raise KeyboardInterrupt(HUNG_UP)

    def on_terminate(self, number: int, frame: FrameType | None) -> None:
        if self._first(TERMINATED) and not _resent_by_prefect():
            raise SystemExit(TERMINATED)


def _resent_by_prefect() -> bool:
    """Return True if Prefect has resent the signal while its exception unwinds the stack."""
    exceptions = sys.modules.get("prefect.exceptions")
    return exceptions is not None and isinstance(sys.exc_info()[1], exceptions.TerminationSignal)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Exit with status 130 after Ctrl-C, 143 after SIGTERM and 129 after SIGHUP.

    Wrap all of `main` in it, in the main thread. A signal unwinds the stack first, so every
    `finally` block and context manager runs. Repeated signals within ten seconds are ignored.
    """
    received = _Received()
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, received.on_interrupt),
        signal.SIGTERM: signal.signal(signal.SIGTERM, received.on_terminate),
    }
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup it stays ignored
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, received.on_hangup)
    try:
        yield
    except BaseException:
        if received.status is not None:
            _print_end(received.status)
            raise SystemExit(received.status) from None
        raise
    else:
        if received.status is not None:  # Prefect has turned the exception into a failed state
            raise SystemExit(received.status)
    finally:
        # After a signal all stay ignored: Prefect's flush at exit must not be interrupted.
        for number, handler in before.items():
            signal.signal(number, handler if received.status is None else signal.SIG_IGN)


def _print_end(status: int) -> None:
    what = "terminated" if status == TERMINATED else "interrupted"
    with suppress(OSError):  # the terminal may be gone
        print(f"{what}: all child processes have been ended", file=sys.stderr)
