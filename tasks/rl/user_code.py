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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tasks.core.errors import ConfigError, RewardError, StageProcessError
from tasks.core.events import emit
from tasks.process.launch import Conversation, python_child
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
            raise ConfigError(f"{self.label}: {error.strerror or error}: {self.path}") from error


class UserCode:
    """The user's code in a process of its own, which lives until `close` or a failure.

    `timeout_s` limits all calls of a request, and loading the file.
    """

    def __init__(
        self, reference: FunctionReference, *, timeout_s: float, log: Log, log_path: Path
    ) -> None:
        reference.require()
        self.label, self._timeout_s = reference.label, timeout_s
        timeout = "environment_timeout_s" if reference.setting == ENVIRONMENT else "timeout_s"
        section = reference.setting.partition(".")[0]
        self._slow_hint = f"{section}.{timeout}=<more> if it needs that long"
        argv = python_child(__name__, str(reference.path), reference.name, str(timeout_s))
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
        slow = f"took more than {self._timeout_s:g} s"
        try:
            request = {"method": method, "calls": calls}
            results = self._process.ask(request, self._timeout_s + GRACE_S)["results"]
        except StageProcessError as error:
            what, hint = f"ended its process (status {error.returncode})", ""
            if error.reason == "timeout":
                what, hint = slow, self._slow_hint
            raise self.failure(what, place(self._at), trace=error.details, hint=hint) from error
        for key, result in results.items():
            if result is None:
                raise self.failure(slow, place(key), hint=self._slow_hint)
            if "failure" in result:
                what, *trace = result["failure"]
                raise self.failure(what, place(key), trace=trace)
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


class Worker:
    """Makes the calls of requests; `timeout_s` limits the coroutines of one."""

    def __init__(self, path: Path, name: str, timeout_s: float) -> None:
        self._path, self._name, self._timeout_s = path, name, timeout_s
        self._loaded: Any = None
        self._objects: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()

    def answer(self, method: str, calls: Mapping[str, Any]) -> dict[str, Any]:
        """Return a `value` or a `failure` of each call; None for one that takes too long."""
        results, coroutines = dict[str, Any](), dict[str, Any]()
        # Outside of the event loop, since the user's code may call asyncio.run.
        for key, argument in calls.items():
            emit("at", key=key)
            results[key] = result_of(partial(self._call, method, key, argument))
            if inspect.isawaitable(results[key].get("value")):
                coroutines[key] = results[key]["value"]
        if coroutines:
            results |= self._loop.run_until_complete(self._together(coroutines))
        return results

    async def _together(self, coroutines: Mapping[str, Any]) -> dict[str, Any]:
        running = {key: asyncio.ensure_future(each) for key, each in coroutines.items()}
        await asyncio.wait(running.values(), timeout=self._timeout_s)
        return {
            key: result_of(task.result) if task.done() else None for key, task in running.items()
        }

    def _call(self, method: str, key: str, argument: Any) -> Any:
        if method == "load":
            self._loaded = load(self._path, self._name)
            return None
        if method == "call":
            return self._loaded(**accepted(self._loaded, argument))
        if method == "reset":
            made = self._objects[key] = self._loaded()
            return made.reset(**accepted(made.reset, argument))
        if method == "step":
            return self._objects[key].step(argument)
        return getattr(self._objects.pop(key), "close", lambda: None)()


def result_of(call: Callable[[], Any]) -> dict[str, Any]:
    """Return the `value` of a call, or its `failure`: the error, and its traceback."""
    try:
        return {"value": plain(call())}
    # User code may raise anything and even call sys.exit; the error of the run reports it.
    except (Exception, SystemExit) as error:
        trace = traceback.TracebackException.from_exception(error)
        while trace.stack and trace.stack[0].filename.startswith((__file__, "<frozen")):
            trace.stack.pop(0)
        lines = "".join(trace.format()).rstrip().splitlines()
        return {"failure": [f"{type(error).__name__}: {error}".splitlines()[0], *lines[-LINES:]]}


def load(path: Path, name: str) -> Any:
    """Import the file and return what the name is bound to; it can import modules beside it."""
    sys.path.insert(0, str(path.parent))
    # A unique name, since a file `math.py` must not become the module `math`.
    unique = f"reward_function_{path.stem}"
    spec = importlib.util.spec_from_file_location(unique, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[unique] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def accepted(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that a function takes: all with `**kwargs`, else those it names."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in offered]
    if missing:
        raise TypeError(
            f"it needs {', '.join(missing)}; available are {', '.join(offered)}: add a column with "
            "that name to the data, or give the parameter a default"
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(offered)
    return {p.name: offered[p.name] for p in named if p.name in offered}


def plain(value: Any) -> Any:
    """Convert tensors and arrays to lists and numbers, for JSON; anything else becomes text."""
    if inspect.isawaitable(value):
        return value
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(element) for element in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return f"{type(value).__name__}: {value}"


def main(path: str, name: str, timeout_s: str) -> None:
    """Answer requests until stdin closes."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the user's code must not read requests
    for variable in [key for key in os.environ if key.startswith(RANK_VARIABLES)]:
        del os.environ[variable]
    worker = Worker(Path(path), name, float(timeout_s))
    emit("ready")
    for line in requests:
        request = json.loads(line)
        faulthandler.dump_traceback_later(float(timeout_s))  # shows where it hangs
        emit("reply", results=worker.answer(request["method"], request["calls"]))
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(*sys.argv[1:])
