"""The process in which a user's reward function lives: it may hang, crash, or print what it likes.

    python -m tasks.rl.rewards.function_child path.py name

Answers JSON requests from stdin, as a `Conversation` asks them, each within its `timeout_s`. The
first one loads the function; one with `keywords` calls it with those that it takes. Imports nothing
heavy: what takes time is the user's own imports.
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

OF_RANKS = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
"""How variables begin by which libraries take a process for a rank of training, which it is not."""
LINES = 30


class Refused(Exception):
    """The function cannot be had or called; the text says why, the hint what to type."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def main() -> None:
    """Answer requests until stdin closes."""
    path, name = Path(sys.argv[1]), sys.argv[2]
    requests = _requests()
    for variable in [key for key in os.environ if key.startswith(OF_RANKS)]:
        del os.environ[variable]
    emit("ready")
    function: Callable[..., Any] | None = None
    for line in requests:
        request = json.loads(line)
        faulthandler.dump_traceback_later(request["timeout_s"])  # shows where it hangs
        try:
            if function is None:
                function = load(path, name)
            keywords = request.get("keywords")
            emit("reply", given=None if keywords is None else _call(function, keywords))
        # The edge to somebody else's code, which may end a process too: all of it is told.
        except (Exception, SystemExit) as error:
            emit("reply", failure=_told(error, path), hint=getattr(error, "hint", ""))
        finally:
            faulthandler.cancel_dump_traceback_later()


def _requests() -> IO[str]:
    """Our stdin, out of reach of a function that reads from its own."""
    mine = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return mine


def load(path: Path, name: str) -> Callable[..., Any]:
    """Run the file and take what has that name; modules beside it can be imported.

    Raises:
        Refused: nothing of that name, or not callable.
    """
    sys.path.insert(0, str(path.parent))
    # A name of its own: a file `math.py` must not become the module `math`.
    unique = f"reward_function_{path.stem}"
    spec = importlib.util.spec_from_file_location(unique, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if function is None:
        there = ", ".join(key for key, one in vars(module).items() if inspect.isfunction(one))
        raise Refused(f"no {name!r} in it", f"reward.function={path}:<one of {there or 'its own'}>")
    if not callable(function):
        kind = type(function).__name__
        raise Refused(f"{name!r} is not callable but {kind}", "name a function")
    return function


def _call(function: Callable[..., Any], keywords: Mapping[str, Any]) -> Any:
    given = function(**taken(function, keywords))
    if inspect.isawaitable(given):
        given = asyncio.run(_awaited(given))
    return plain(given)


async def _awaited(given: Any) -> Any:
    return await given


def taken(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Of what is offered, what the function takes: all with `**kwargs`, else what it names.

    Raises:
        Refused: it needs something that is not offered.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C, and says nothing of itself
        return dict(offered)
    needed = [
        one.name
        for one in parameters
        if one.default is one.empty
        and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]
    absent = [name for name in needed if name not in offered]
    if absent:
        raise Refused(
            f"it needs {', '.join(absent)}; there are {', '.join(offered)}",
            "a column of the data has to have that name, or give the parameter a default",
        )
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return dict(offered)
    return {one.name: offered[one.name] for one in parameters if one.name in offered}


def plain(given: Any) -> Any:
    """Lists and numbers out of tensors, arrays, tuples and their elements; anything else as text.

    What it is worth is judged by the parent.
    """
    if hasattr(given, "tolist"):
        given = given.tolist()
    if isinstance(given, (list, tuple)):
        return [plain(one) for one in given]
    if given is None or isinstance(given, (bool, int, float, str)):
        return given
    return f"{type(given).__name__}: {given}"


def _told(error: BaseException, path: Path) -> list[str]:
    """The error, and where in the user's code it came from."""
    if isinstance(error, Refused):
        return [str(error)]
    trace = traceback.TracebackException.from_exception(error)
    ours = str(Path(__file__).resolve().parent)
    while trace.stack and trace.stack[0].filename.startswith((ours, "<frozen")):
        trace.stack.pop(0)
    lines = "".join(trace.format()).rstrip().splitlines()
    first = "".join(trace.format_exception_only()).strip().splitlines()
    if isinstance(error, SyntaxError):
        return [f"{first[-1]} ({path.name}, line {error.lineno})", *lines[-LINES:]]
    return [first[-1] if first else type(error).__name__, *lines[-LINES:]]


if __name__ == "__main__":
    main()
