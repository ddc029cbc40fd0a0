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

STATUSES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
"""Exit status after a signal."""
SETTLE_S = 10.0
"""Seconds after a signal in which further ones are ignored: time for cleaning up."""
LEAVE_S = 15.0
"""Seconds from the end of a stopped flow to that of the process, even if a server hangs."""


class _Handler:
    """Signal handler; `status` is the exit status of the first signal."""

    def __init__(self) -> None:
        self.status: int | None = None
        self._at = -SETTLE_S

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now, status = time.monotonic(), STATUSES[signal.Signals(number)]
        if now - self._at < SETTLE_S:
            return
        if self.status is None:  # the supervisors end all child processes when this one is gone
            leave = threading.Timer(LEAVE_S, os._exit, [status])
            leave.daemon = True
            leave.start()
        self.status, self._at = self.status or status, now
        if number != signal.SIGTERM:
            raise KeyboardInterrupt(status)
        prefect = sys.modules.get("prefect.exceptions")
        if prefect is None or not isinstance(sys.exc_info()[1], prefect.TerminationSignal):
            raise SystemExit(status)  # else Prefect resent it while its exception unwinds the stack


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Exit with status 130 after Ctrl-C, 143 after SIGTERM and 129 after SIGHUP.

    Wrap all of `main` in it, in the main thread. A signal unwinds the stack first, so every
    `finally` block and context manager runs. Repeated signals within ten seconds are ignored.
    """
    handler = _Handler()
    before = {
        number: signal.signal(number, handler)
        for number in STATUSES
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN  # by nohup
    }
    try:
        yield
    except BaseException:
        if handler.status is None:
            raise
        with suppress(OSError):  # the terminal may be gone
            what = "terminated" if handler.status == STATUSES[signal.SIGTERM] else "interrupted"
            print(f"{what}: all child processes have been ended", file=sys.stderr)
        raise SystemExit(handler.status) from None
    finally:
        # After a signal all stay ignored: Prefect's flush at exit must not be interrupted.
        for number, previous in before.items():
            signal.signal(number, previous if handler.status is None else signal.SIG_IGN)
    if handler.status is not None:  # Prefect has turned the exception into a failed state
        raise SystemExit(handler.status)
