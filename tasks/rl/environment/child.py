"""The process that runs a user's environments, which may hang, crash or print anything.

    python -m tasks.rl.environment.child path.py Class rl.environment

It has one object of the class per episode. A request has the keys of episodes to `close`, those to
`reset` with their keyword arguments, and those to `step` with their responses. The reply has a
result for each reset or step, in order. Coroutines of a request run concurrently; their event loop
lives as long as the process. This module imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
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
            request: `timeout_s`, and `arguments` with `close`, `reset` and `step`.
        """
        work: Mapping[str, Any] = request["arguments"]
        for key in work["close"]:
            environment = self._running.pop(key, None)
            if hasattr(environment, "close"):
                environment.close()
        calls: list[tuple[str, Callable[[], Any]]] = [
            *((key, lambda key=key, offered=row: self._reset(kind, key, offered))
              for key, row in work["reset"]),
            *((key, lambda key=key, text=text: self._running[key].step(text))
              for key, text in work["step"]),
        ]  # fmt: skip
        results = self._loop.run_until_complete(_all(calls, request["timeout_s"]))
        return {"results": results}

    def _reset(self, kind: Callable[[], Any], key: str, offered: Mapping[str, Any]) -> Any:
        environment = self._running[key] = kind()
        return environment.reset(**taken(environment.reset, offered))


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


async def _all(
    calls: Sequence[tuple[str, Callable[[], Any]]], timeout_s: float
) -> list[dict[str, Any]]:
    coroutines: list[Coroutine[Any, Any, dict[str, Any]]] = [
        _result(key, call, timeout_s) for key, call in calls
    ]
    return await asyncio.gather(*coroutines)


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
