"""The process that runs a user's environments, which may hang, crash or print anything.

    python -m tasks.rl.environment.child path.py Class rl.environment

It has one object of the class per episode. A request names a `method` (reset, step, close) and has
the key of each episode with its argument: columns of the row, a response, nothing. The reply has
their results, in order. Coroutines of a request run concurrently; their event loop lives as long as
the process. This module imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tasks.core.events import emit
from tasks.rl.rewards.function_child import Refused, failure, plain, serve, taken

METHODS = ("reset", "step")


class Environments:
    """The environments of the running episodes, by key."""

    def __init__(self) -> None:
        self._running: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()

    def answer(self, kind: Callable[[], Any], request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the reply to a request.

        Args:
            kind: the user's class.
            request: `timeout_s`, and `arguments` with `method` and `calls`.
        """
        method, calls = request["arguments"]["method"], request["arguments"]["calls"]
        results = [
            _result(key, partial(self._call, kind, method, key, argument), request["timeout_s"])
            for key, argument in calls
        ]
        return {"results": self._loop.run_until_complete(_all(results))}

    def _call(self, kind: Callable[[], Any], method: str, key: str, argument: Any) -> Any:
        if method == "step":
            return self._running[key].step(argument)
        if method == "close":
            environment = self._running.pop(key)
            return environment.close() if hasattr(environment, "close") else None
        environment = self._running[key] = kind()
        return environment.reset(**taken(environment.reset, argument))


def require_methods(kind: Any) -> None:
    """Refuse what is not a class with the methods `reset` and `step`.

    Raises:
        Refused: names what is missing.
    """
    if not inspect.isclass(kind):
        raise Refused(f"{getattr(kind, '__name__', kind)!r} is no class", "name a class")
    missing = [name for name in METHODS if not callable(getattr(kind, name, None))]
    if missing:
        raise Refused(
            f"class {kind.__name__} has no method {' and no method '.join(missing)}",
            "def reset(self, **columns) and def step(self, text), which returns "
            "(observation, reward, done)",
        )


async def _all(results: Sequence[Coroutine[Any, Any, dict[str, Any]]]) -> list[dict[str, Any]]:
    return await asyncio.gather(*results)


async def _result(key: str, call: Callable[[], Any], timeout_s: float) -> dict[str, Any]:
    """Return what a method gave, or its failure."""
    emit("at", episode=key)  # if this call hangs, the parent knows whose it is
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            value = call()
            if inspect.isawaitable(value):
                value = await value
    except (Exception, SystemExit) as error:
        if limit.expired():
            hint = "rl.environment_timeout_s=<more> if it needs that long"
            return {"failure": [f"took more than {timeout_s:g} s"], "hint": hint}
        return failure(error, Path(sys.argv[1]))
    return {"value": plain(value)}


if __name__ == "__main__":
    serve(Environments().answer, require_methods)
