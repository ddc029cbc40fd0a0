"""`path.py:name` of the user, loaded and called in a process of its own.

    code = UserCode(FunctionReference.of("judge.py:score"), timeout_s=60, log=log, log_path=path)
    values = code.ask("call", {"": keywords}, lambda key: ("on 4 responses", details))

This file is also the program of that process. The code may hang, crash or print anything: the
process ends with all of its descendants when a call takes too long, on `close`, and when this
process dies. A request names a method and has the arguments of its calls by key:

    load    import the file
    call    call the function with those keywords that it takes
    reset   make an object of the class for this key, and call its `reset`
    step    call the object's `step`
    close   call the object's `close`, if it has one, and forget the object

Coroutines of a request run concurrently; their event loop lives as long as the process.
"""

from __future__ import annotations

import asyncio
import faulthandler
import hashlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.errors import ConfigError, RewardError, StageProcessError
from tasks.core.events import emit
from tasks.process.child import python_child
from tasks.process.json_worker import Conversation
from tasks.process.output import Log

REWARD, EVAL, ENVIRONMENT = "reward.function", "eval.function", "rl.environment"
CALCULATOR = "calculator"
"""Value of `rl.environment` for the toy's."""
GRACE_S = 2.0
"""Seconds after the timeout in which the process reports where the code hangs."""
LINES = 30
"""Lines of a traceback in an error."""
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
"""Prefixes of variables by which libraries recognise a training rank, which the process is not."""

Place = tuple[str, Sequence[str]]
"""Place of a failed call, such as "on 4 responses", and the lines that show the prompt."""


@dataclass(frozen=True)
class FunctionReference:
    """A function or class in a file of the user."""

    path: Path  # absolute path of the file
    name: str  # name of the function or class
    setting: str = REWARD  # setting that names it

    @classmethod
    def of(cls, text: str, setting: str = REWARD) -> FunctionReference:
        """Parse `path.py:name`; a relative path starts at the working directory."""
        if setting == ENVIRONMENT and text == CALCULATOR:
            from tasks.toy import calculator

            return cls(Path(calculator.__file__), "Calculator", setting)
        path, colon, name = text.rpartition(":")
        if not colon or not path.endswith(".py") or not name.isidentifier():
            raise ConfigError(
                f"{setting}={text} is not of the form path.py:name",
                hint=f"{setting}=<path.py>:<name>",
            )
        return cls(Path(path).expanduser().absolute(), name, setting)

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"

    @property
    def label(self) -> str:
        """The setting with its value."""
        return f"{self.setting}={self}"

    @property
    def slow_hint(self) -> str:
        """Advice for slow code: the setting to type."""
        section = self.setting.partition(".")[0]
        key = "environment_timeout_s" if self.setting == ENVIRONMENT else "timeout_s"
        return f"{section}.{key}=<more> if it needs that long"

    def digest(self) -> str:
        """Return the SHA-256 of the file. Files that it imports are not included."""
        return hashlib.sha256(self._read()).hexdigest()

    def require(self) -> None:
        """Raise a ConfigError unless the file is Python and has the name; runs nothing."""
        try:
            names = compile(self._read(), str(self.path), "exec").co_names
        except (SyntaxError, ValueError) as error:
            raise ConfigError(f"{self.label}: the file is not Python: {error}") from error
        if self.name not in names:
            raise ConfigError(
                f"{self.label}: no {self.name!r} at the top level of the file",
                hint=f"{self.setting}={self.path}:<name>",
            )

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{self.label}: {error.strerror or error}: {self.path}",
                hint=f"{self.setting}=<path.py>:{self.name}",
            ) from error


class UserCode:
    """The user's code in a process of its own, which lives until `close` or a failure.

    `timeout_s` limits all calls of a request, and loading the file.
    """

    def __init__(
        self, reference: FunctionReference, *, timeout_s: float, log: Log, log_path: Path
    ) -> None:
        reference.require()
        self.label = reference.label
        self._slow_hint, self._timeout_s = reference.slow_hint, timeout_s
        path, name, setting = str(reference.path), reference.name, reference.setting
        argv = python_child("tasks.rl.user_code", path, name, setting, str(timeout_s))
        process = Conversation(
            argv, stage="reward", log=log, log_path=log_path, on_event=self._on_event
        )
        with ExitStack() as opened:
            self._process = opened.enter_context(process)
            self.ask("load", {"": None}, lambda _: ("when it was loaded", ()))
            self._opened = opened.pop_all()

    def ask(
        self, method: str, calls: Mapping[str, Any], place: Callable[[str], Place]
    ) -> dict[str, Any]:
        """Make calls of a method, and return their values by key; raise the first failure.

        Arguments are plain JSON by key. `place` says where the call with a key failed.
        """
        if not calls:
            return {}
        self._at = next(iter(calls))  # if a call hangs, the error says which
        request = {"method": method, "calls": calls}
        try:
            results = self._process.ask(request, self._timeout_s + GRACE_S)["results"]
        except StageProcessError as error:
            what, hint = f"ended its process (status {error.returncode})", ""
            if error.reason == "timeout":
                what, hint = f"took more than {self._timeout_s:g} s", self._slow_hint
            raise self.failure(what, place(self._at), trace=error.details, hint=hint) from error
        for key, result in results.items():
            if "failure" in result:
                what, *trace = result["failure"]
                raise self.failure(what, place(key), trace=trace, hint=result["hint"])
        return {key: result["value"] for key, result in results.items()}

    def failure(
        self, what: str, place: Place, *, trace: Sequence[str] = (), hint: str = ""
    ) -> RewardError:
        """Return the error about a call that failed, or gave a wrong value."""
        where, details = place
        message = f"{self.label} failed {where}: {what}"
        return RewardError(message, details=[*details, *trace], hint=hint)

    def close(self) -> None:
        """End the process."""
        self._opened.close()

    def _on_event(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "at":
            self._at = event["key"]


# From here on: the process of the user's code.


class Refused(Exception):
    """The code cannot be called; the message says why, `hint` what to type."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class Worker:
    """Makes the calls of requests; `timeout_s` limits those of one."""

    def __init__(self, reference: FunctionReference, timeout_s: float) -> None:
        self._reference, self._timeout_s = reference, timeout_s
        self._loaded: Any = None
        self._objects: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()

    def answer(self, method: str, calls: Mapping[str, Any]) -> dict[str, Any]:
        """Return a `value` or a `failure` of each call."""
        # Outside of the loop, since the user's code may call asyncio.run.
        results = {key: self._begin(method, key, argument) for key, argument in calls.items()}
        waiting = {key: result for key, result in results.items() if inspect.isawaitable(result)}
        if waiting:
            results |= self._loop.run_until_complete(self._finish(waiting))
        return results

    def _begin(self, method: str, key: str, argument: Any) -> Any:
        emit("at", key=key)
        try:
            value = self._call(method, key, argument)
            return value if inspect.isawaitable(value) else {"value": plain(value)}
        # User code may raise anything and even call sys.exit; the error of the run reports it.
        except (Exception, SystemExit) as error:
            return failed(error)

    async def _finish(self, waiting: Mapping[str, Awaitable[Any]]) -> dict[str, Any]:
        results = await asyncio.gather(*map(self._value, waiting.values()))
        return dict(zip(waiting, results, strict=True))

    async def _value(self, waiting: Awaitable[Any]) -> dict[str, Any]:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return {"value": plain(await waiting)}
        except (Exception, SystemExit) as error:
            if limit.expired():
                slow = f"took more than {self._timeout_s:g} s"
                return failed(Refused(slow, self._reference.slow_hint))
            return failed(error)

    def _call(self, method: str, key: str, argument: Any) -> Any:
        if method == "load":
            self._loaded = load(self._reference)
            return None
        if method == "call":
            return self._loaded(**accepted(self._loaded, argument))
        if method == "reset":
            made = self._objects[key] = self._loaded()
            return made.reset(**accepted(made.reset, argument))
        if method == "step":
            return self._objects[key].step(argument)
        made = self._objects.pop(key)
        return made.close() if hasattr(made, "close") else None


def load(reference: FunctionReference) -> Any:
    """Import the file and return what the name is bound to; it can import modules beside it."""
    sys.path.insert(0, str(reference.path.parent))
    # A unique name, since a file `math.py` must not become the module `math`.
    unique = f"reward_function_{reference.path.stem}"
    spec = importlib.util.spec_from_file_location(unique, reference.path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[unique] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, reference.name)


def accepted(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that a function takes: all with `**kwargs`, else those it names."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in offered]
    if missing:
        raise Refused(
            f"it needs {', '.join(missing)}; available are {', '.join(offered)}",
            "add a column with that name to the data, or give the parameter a default",
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(offered)
    return {p.name: offered[p.name] for p in named if p.name in offered}


def plain(value: Any) -> Any:
    """Convert tensors and arrays to lists and numbers, for JSON; anything else becomes text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(element) for element in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return f"{type(value).__name__}: {value}"


def failed(error: BaseException) -> dict[str, Any]:
    """Return the result of a call that raised: the error, and its traceback in the user's code."""
    if isinstance(error, Refused):
        return {"failure": [str(error)], "hint": error.hint}
    trace = traceback.TracebackException.from_exception(error)
    while trace.stack and trace.stack[0].filename.startswith((__file__, "<frozen")):
        trace.stack.pop(0)
    lines = "".join(trace.format()).rstrip().splitlines()
    first = f"{type(error).__name__}: {error}".splitlines()[0]
    return {"failure": [first, *lines[-LINES:]], "hint": ""}


def main(path: str, name: str, setting: str, timeout_s: str) -> None:
    """Answer requests until stdin closes."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the user's code must not read requests
    for variable in [key for key in os.environ if key.startswith(RANK_VARIABLES)]:
        del os.environ[variable]
    worker = Worker(FunctionReference(Path(path), name, setting), float(timeout_s))
    emit("ready")
    for line in requests:
        request = json.loads(line)
        faulthandler.dump_traceback_later(float(timeout_s))  # shows where it hangs
        emit("reply", results=worker.answer(request["method"], request["calls"]))
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(*sys.argv[1:])
