"""Start a command, or print in one line why this Python cannot run it.

This module imports the standard library only, since other libraries may not be installed.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

OLDEST = (3, 11)
_OURS = ("flows", "tasks", "benchmarks", "infra")


def start(module: str) -> int:
    """Run `main` of a module.

    Returns:
        The exit status; 2 if Python is too old or a library is missing.
    """
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST:
        return _refuse(f"this is Python {version}, and {'.'.join(map(str, OLDEST))} is needed")
    try:
        main = import_module(module).main
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if not library or library in _OURS:
            raise
        return _refuse(f"{sys.executable} (Python {version}) has no {library}")
    status: int = main()
    return status


def _refuse(reason: str) -> int:
    """Print the reason and a command that works. Returns the exit status 2."""
    project = Path(__file__).resolve().parents[2]
    python, program = project / ".venv" / "bin" / "python", Path(sys.argv[0]).name
    first = "" if python.exists() else f"make -C {project} setup && "
    again = " ".join([str(python), str(project / "flows" / program), *sys.argv[1:]])
    print(f"{program}: {reason}; type: {first}{again}", file=sys.stderr)
    return 2
