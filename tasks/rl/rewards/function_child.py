"""The process that runs a function of the user, which may hang, crash or print anything.

    python -m tasks.rl.rewards.function_child path.py name reward.function

Answers JSON requests of a `Conversation` from stdin, each within its `timeout_s`. The first request
loads the function; a request with `arguments` calls it. This module imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from tasks.core.events import emit

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
"""Prefixes of variables by which libraries recognise a training rank, which this process is not."""
LINES = 30
"""Lines of a traceback in an error."""


class Refused(Exception):
    """The function cannot be loaded or called; the message says why, `hint` what to type."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def main() -> None:
    """Answer requests until stdin closes."""
    serve(lambda function, request: {"given": _call(function, request["arguments"])})


def serve(
    call: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]],
    check: Callable[[Any], None] = lambda loaded: None,
) -> None:
    """Answer requests with `call(what was loaded, request)` until stdin closes.

    Args:
        call: returns the fields of a reply.
        check: called once with what was loaded; raises Refused if it cannot be used.
    """
    path, name, setting = Path(sys.argv[1]), *sys.argv[2:]
    requests = _requests()
    for variable in [key for key in os.environ if key.startswith(RANK_VARIABLES)]:
        del os.environ[variable]
    emit("ready")
    loaded: Any = None
    for line in requests:
        request = json.loads(line)
        faulthandler.dump_traceback_later(request["timeout_s"])  # shows where it hangs
        try:
            if loaded is None:
                loaded = load(path, name, setting)
                check(loaded)
            emit("reply", **({} if request["arguments"] is None else call(loaded, request)))
        # User code may raise anything and even call sys.exit; the parent reports all of it.
        except (Exception, SystemExit) as error:
            emit("reply", **failure(error, path))
        finally:
            faulthandler.cancel_dump_traceback_later()


def _requests() -> IO[str]:
    """Return the real stdin, and give the user's function an empty one."""
    mine = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return mine


def load(path: Path, name: str, setting: str) -> Callable[..., Any]:
    """Import the file and return the function; it can import modules beside it.

    Args:
        path: the user's Python file.
        name: the function in it.
        setting: setting that names it.

    Raises:
        Refused: no such name, or it is not callable.
    """
    sys.path.insert(0, str(path.parent))
    # A unique name, since a file `math.py` must not become the module `math`.
    unique = f"reward_function_{path.stem}"
    spec = importlib.util.spec_from_file_location(unique, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if function is None:
        names = ", ".join(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise Refused(f"no {name!r} in it", f"{setting}={path}:<one of {names or 'its own'}>")
    if not callable(function):
        kind = type(function).__name__
        raise Refused(f"{name!r} is not callable but {kind}", "name a function")
    return function


def _call(function: Callable[..., Any], keywords: Mapping[str, Any]) -> Any:
    result = function(**taken(function, keywords))
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    return plain(result)


async def _awaited(result: Any) -> Any:
    return await result


def taken(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that the function takes: all with `**kwargs`, else those it names.

    Args:
        function: the user's function.
        offered: every available keyword argument.

    Raises:
        Refused: it needs a parameter that is not offered.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature
        return dict(offered)
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind
        in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    missing = [name for name in needed if name not in offered]
    if missing:
        raise Refused(
            f"it needs {', '.join(missing)}; available are {', '.join(offered)}",
            "add a column with that name to the data, or give the parameter a default",
        )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(offered)
    return {
        parameter.name: offered[parameter.name]
        for parameter in parameters
        if parameter.name in offered
    }


def plain(value: Any) -> Any:
    """Convert tensors, arrays and tuples to lists and numbers; anything else becomes text.

    The parent checks the values.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(element) for element in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return f"{type(value).__name__}: {value}"


def failure(error: BaseException, path: Path) -> dict[str, Any]:
    """Return the fields of a reply about an exception of the user's code in a file."""
    return {"failure": _error_lines(error, path), "hint": getattr(error, "hint", "")}


def _error_lines(error: BaseException, path: Path) -> list[str]:
    """Return the error and its traceback, from the user's code on."""
    if isinstance(error, Refused):
        return [str(error)]
    trace = traceback.TracebackException.from_exception(error)
    ours = str(Path(__file__).resolve().parents[1])
    while trace.stack and trace.stack[0].filename.startswith((ours, "<frozen")):
        trace.stack.pop(0)
    lines = "".join(trace.format()).rstrip().splitlines()
    first = "".join(trace.format_exception_only()).strip().splitlines()
    if isinstance(error, SyntaxError):
        return [f"{first[-1]} ({path.name}, line {error.lineno})", *lines[-LINES:]]
    return [first[-1] if first else type(error).__name__, *lines[-LINES:]]


if __name__ == "__main__":
    main()
