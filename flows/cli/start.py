"""Start a command, or print in one line why this Python cannot run it.

This module imports nothing but the standard library, since other libraries may not be installed.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from tasks.core.private import stay_private
from tasks.process.exit_process import end_process

OLDEST = (3, 11)
_GC_THRESHOLD = 50_000
"""New objects per garbage collection. Python's 700 costs two seconds while Prefect and MLflow are
imported, which create a million objects and free none."""
_OURS = ("flows", "tasks", "benchmarks", "infra")


def start(module: str, *arguments: str) -> NoReturn:
    """Run `main` of a module with these arguments, and end this process with its exit status.

    The status is 2 if Python is too old or a library is missing.
    """
    gc.set_threshold(_GC_THRESHOLD)
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
    """Print the reason and a command that works. Returns the exit status 2."""
    project = Path(__file__).resolve().parents[2]
    python, program = project / ".venv" / "bin" / "python", Path(sys.argv[0]).name
    again = [str(python), str(project / "flows" / program), *sys.argv[1:]]
    setup = f"make -C {project} setup && " if not python.exists() else ""
    if program.startswith("plumbline "):
        again = [str(python.with_name("plumbline")), program.split()[1], *sys.argv[1:]]
        setup = "pip install 'plumbline[train]' or " if setup else ""
    print(f"{program}: {sys.executable} {reason}; type: {setup}{' '.join(again)}", file=sys.stderr)
    return 2
