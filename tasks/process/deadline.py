"""Time limit of a stage, which runs in the main thread."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

from tasks.core.errors import TimeLimitError


class _Expired(BaseException):
    """Unwinds the stage; no `except Exception` on the way can swallow it."""


@contextlib.contextmanager
def deadline(stage: str, setting: str, seconds: float | None) -> Iterator[None]:
    """End the block after a time; its `finally` blocks end the child processes.

    Raises TimeLimitError, which names the setting with the limit.
    """
    if seconds is None:
        yield
        return

    def expire(*_: object) -> None:
        raise _Expired

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _Expired:
        raise TimeLimitError(stage, setting, seconds) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
