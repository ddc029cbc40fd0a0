"""Ctrl-C, SIGTERM, a closed terminal: every run recorded as ended, every child gone.

Prefect turns a SIGTERM into an exception inside a flow, but then sends the signal once more, to the
handler it found. If that is the default one, the process dies before the flow run was reported, and
stays `Running` for ever. With a handler of ours in place the flow run is reported as crashed.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType

HUNG_UP, INTERRUPTED, TERMINATED = 129, 130, 143

SETTLE_S = 10.0
"""For so long after the first signal another one does not disturb the cleaning up."""


class _Received:
    """The first signal, and the rule for what each does."""

    def __init__(self) -> None:
        self.status: int | None = None
        self._at = 0.0

    def _first(self, status: int) -> bool:
        now = time.monotonic()
        if self.status is not None and now - self._at < SETTLE_S:
            return False
        self.status, self._at = self.status or status, now
        return True

    def on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._first(INTERRUPTED):
            raise KeyboardInterrupt

    def on_hangup(self, number: int, frame: FrameType | None) -> None:
        if self._first(HUNG_UP):
            raise KeyboardInterrupt

    def on_terminate(self, number: int, frame: FrameType | None) -> None:
        if self._first(TERMINATED) and not _prefect_is_at_it():
            raise SystemExit(TERMINATED)


def _prefect_is_at_it() -> bool:
    """Whether this is Prefect's second delivery, with its own exception already on the way up."""
    exceptions = sys.modules.get("prefect.exceptions")
    return exceptions is not None and isinstance(sys.exc_info()[1], exceptions.TerminationSignal)


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Put it around all of `main`: Ctrl-C makes the process exit 130, SIGTERM 143, SIGHUP 129.

    All unwind the stack first, so every `finally` and context manager has its turn. Impatient
    repetitions within ten seconds are ignored. To be used in the main thread.
    """
    received = _Received()
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, received.on_interrupt),
        signal.SIGTERM: signal.signal(signal.SIGTERM, received.on_terminate),
    }
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup means it
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, received.on_hangup)
    try:
        yield
    except BaseException:
        if received.status is not None:
            _say(received.status)
            raise SystemExit(received.status) from None
        raise
    else:
        if received.status is not None:  # somebody made a failed state of it
            raise SystemExit(received.status)
    finally:
        # Ours stay ignored to the end: what Prefect flushes at exit must not be interrupted.
        for number, handler in before.items():
            signal.signal(number, handler if received.status is None else signal.SIG_IGN)


def _say(status: int) -> None:
    what = "terminated" if status == TERMINATED else "interrupted"
    with contextlib.suppress(OSError):  # the terminal may be the one that went away
        print(f"{what}: all child processes have been ended", file=sys.stderr)
