"""Start a command, and end its process with the exit status that is usual.

This module imports nothing but the standard library, since other libraries may not be installed.

Signals need care because of Prefect. It turns a SIGTERM into an exception inside a flow, and then
sends the signal once more, to the handler that was there before. The default handler would end the
process before the flow run is reported, and the run would stay `Running` for ever. With our handler
it is reported as crashed.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tasks.core.files import stay_private
from tasks.process.torch_process import end_process

OLDEST = (3, 11)
_GC_THRESHOLD = 50_000
"""New objects per garbage collection. Python's 700 costs two seconds while Prefect and MLflow are
imported, which create a million objects and free none."""
_OURS = ("flows", "tasks", "benchmarks", "infra")
STATUSES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
"""Exit status after a signal."""
SETTLE_S = 10.0
"""Seconds after a signal in which further ones are ignored: time for cleaning up."""
LEAVE_S = 15.0
"""Seconds from the end of a stopped flow to that of the process, even if a server hangs."""


def start(module: str, *arguments: str) -> NoReturn:
    """Run `main` of a module with these arguments, and end this process with its exit status.

    The status is 2 if Python is too old or a library is missing.
    """
    gc.set_threshold(_GC_THRESHOLD)
    with exit_on_signals():
        status = _run(module, arguments)
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    end_process(status)  # taking the interpreter apart would take another second


def _run(module: str, arguments: Sequence[str]) -> int:
    """Return the exit status of a module's `main`, or 2."""
    if sys.version_info < OLDEST:
        return _refuse("is older than 3.11")
    try:
        main = import_module(module).main
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if not library or library in _OURS:
            raise
        return _refuse(f"has no {library}")
    stay_private()
    status: int = main(*arguments)
    return status


def _refuse(reason: str) -> int:
    """Print the reason and what to type. Returns the exit status 2."""
    project, program = Path(__file__).resolve().parents[2], Path(sys.argv[0]).name
    python = project / ".venv" / "bin" / "python"
    again = f"{python} {project / 'flows' / program} {' '.join(sys.argv[1:])}"
    if program.startswith("plumbline "):  # an installed package
        again = "pip install 'plumbline[train]'"
    elif not python.exists():
        again = f"make -C {project} setup && {again}"
    print(f"{program}: {sys.executable} {reason}; type: {again}", file=sys.stderr)
    return 2


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Exit with status 130 after Ctrl-C, 143 after SIGTERM and 129 after SIGHUP.

    A signal unwinds the stack first, so every `finally` block and context manager runs. Repeated
    signals within ten seconds are ignored.
    """
    status: int | None = None  # of the first signal
    at = -SETTLE_S

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal status, at
        now, own = time.monotonic(), STATUSES[signal.Signals(number)]
        if now - at < SETTLE_S:
            return
        if status is None:  # the supervisors end all child processes when this one is gone
            leave = threading.Timer(LEAVE_S, os._exit, [own])
            leave.daemon = True
            leave.start()
        status, at = status or own, now
        if number != signal.SIGTERM:
            raise KeyboardInterrupt(own)
        prefect = sys.modules.get("prefect.exceptions")
        if prefect is None or not isinstance(sys.exc_info()[1], prefect.TerminationSignal):
            raise SystemExit(own)  # else Prefect resent it while its exception unwinds the stack

    before = {
        number: signal.signal(number, handle)
        for number in STATUSES
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN  # by nohup
    }
    try:
        yield
    except BaseException:
        if status is None:
            raise
        with suppress(OSError):  # the terminal may be gone
            what = "terminated" if status == STATUSES[signal.SIGTERM] else "interrupted"
            print(f"{what}: all child processes have been ended", file=sys.stderr)
        raise SystemExit(status) from None
    finally:
        # After a signal all stay ignored: Prefect's flush at exit must not be interrupted.
        for number, previous in before.items():
            signal.signal(number, previous if status is None else signal.SIG_IGN)
    if status is not None:  # Prefect has turned the exception into a failed state
        raise SystemExit(status)
