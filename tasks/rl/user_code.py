"""`path.py:name` of the user, loaded and called in a process of its own.

    code = UserCode(FunctionReference.of("judge.py:score"), timeout_s=60, log=log, log_path=path)
    values = code.ask("call", {"": keywords}, lambda key: ("on 4 responses", details))

`UserCode` starts this file as a program, and `Conversation` passes it one request after another.
The code may hang, crash or print anything: the process ends with all of its descendants when a call
takes too long, on `close`, and when this process dies.

A request names a method and has the arguments of its calls by key:

    load    import the file
    call    call the function with those keywords that it takes
    reset   make an object of the class for this key, and call its `reset`
    step    call the object's `step`
    close   call the object's `close`, if it has one, and forget the object

Coroutines of a request run concurrently; their event loop lives as long as the process.
"""

from __future__ import annotations

import ast
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
from typing import IO, Any

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
    """A function or class in a file, which is parsed and not run."""

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
            hint = cls(Path(), "", setting)._example
            raise ConfigError(f"{setting}={text} is not of the form path.py:name", hint=hint)
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

    @property
    def _example(self) -> str:
        kind = "class" if self.setting == ENVIRONMENT else "function"
        example = f"{self.setting}=<path.py>:<name of a {kind} in it>"
        return f"{example}, or exact_match" if self.setting == REWARD else example

    def digest(self) -> str:
        """Return the SHA-256 of the file. Files that it imports are not included."""
        return hashlib.sha256(self._read()).hexdigest()

    def require(self) -> None:
        """Raise a ConfigError unless the file exists and binds the name at its top level."""
        try:
            tree = ast.parse(self._read(), str(self.path))
        except (SyntaxError, ValueError) as error:
            raise ConfigError(
                f"{self.label}: the file is not Python: {error}", hint=self._example
            ) from error
        names = _names(tree)
        if self.name not in names and "*" not in names:
            there = ", ".join(sorted(names)) or "nothing"
            raise ConfigError(
                f"{self.label}: no {self.name!r} in the file, which has {there}",
                hint=self._example,
            )

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{self.label}: {error.strerror or error}: {self.path}", hint=self._example
            ) from error


def _names(tree: ast.Module) -> set[str]:
    """Return the names bound at the top level of a file; `*` if it has a star import."""
    names: set[str] = set()
    nodes: list[ast.AST] = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue  # names inside it are local
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        nodes.extend(ast.iter_child_nodes(node))
    return names


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
        with ExitStack() as opened:
            self._process = opened.enter_context(
                Conversation(
                    argv, stage="reward", log=log, log_path=log_path, on_event=self._on_event
                )
            )
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
            if error.reason == "cancelled":
                raise
            what, hint = f"ended its process (status {error.returncode})", ""
            if error.reason == "timeout":
                what, hint = f"took more than {self._timeout_s:g} s", self._slow_hint
            trace = ["its last lines of output:", *error.details]
            raise self.failure(what, place(self._at), trace=trace, hint=hint) from error
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
    """The code cannot be loaded or called; the message says why, `hint` what to type."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class Worker:
    """Makes the calls of requests; `timeout_s` limits all calls of one."""

    def __init__(self, reference: FunctionReference, timeout_s: float) -> None:
        self._reference, self._timeout_s = reference, timeout_s
        self._loaded: Any = None
        self._objects: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()

    def answer(self, method: str, calls: Mapping[str, Any]) -> dict[str, Any]:
        """Return a `value` or a `failure` of each call."""
        until = self._loop.time() + self._timeout_s
        # Outside of the loop, since the user's code may call asyncio.run.
        results = {key: self._begin(method, key, argument) for key, argument in calls.items()}
        waiting = {key: result for key, result in results.items() if inspect.isawaitable(result)}
        if waiting:
            finished = [self._finish(key, result, until) for key, result in waiting.items()]
            results |= zip(waiting, self._loop.run_until_complete(_all(finished)), strict=True)
        return results

    def _begin(self, method: str, key: str, argument: Any) -> Any:
        emit("at", key=key)
        try:
            value = self._call(method, key, argument)
            return value if inspect.isawaitable(value) else {"value": plain(value)}
        # User code may raise anything and even call sys.exit; the error of the run reports it.
        except (Exception, SystemExit) as error:
            return failed(error)

    async def _finish(self, key: str, value: Awaitable[Any], until: float) -> dict[str, Any]:
        emit("at", key=key)
        limit = asyncio.timeout_at(until)
        try:
            async with limit:
                return {"value": plain(await value)}
        except (Exception, SystemExit) as error:
            if limit.expired():
                what = f"took more than {self._timeout_s:g} s"
                return {"failure": [what], "hint": self._reference.slow_hint}
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


async def _all(waiting: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*waiting)


def load(reference: FunctionReference) -> Any:
    """Import the file and return what the name is bound to; it can import modules beside it."""
    path, name = reference.path, reference.name
    sys.path.insert(0, str(path.parent))
    # A unique name, since a file `math.py` must not become the module `math`.
    unique = f"reward_function_{path.stem}"
    spec = importlib.util.spec_from_file_location(unique, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    spec.loader.exec_module(module)
    loaded = getattr(module, name, None)
    if reference.setting == ENVIRONMENT:
        if not inspect.isclass(loaded):
            raise Refused(f"{name!r} is no class but {type(loaded).__name__}", "name a class")
        missing = [each for each in ("reset", "step") if not callable(getattr(loaded, each, None))]
        if missing:
            raise Refused(
                f"class {name} has no method {' and no method '.join(missing)}",
                "def reset(self, **columns) and def step(self, text), which returns "
                "(observation, reward, done)",
            )
    elif not callable(loaded):
        raise Refused(f"{name!r} is no function but {type(loaded).__name__}", "name a function")
    return loaded


def accepted(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that a function takes: all with `**kwargs`, else those it names."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature
        return dict(offered)
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in optional
        and parameter.name not in offered
    ]
    if missing:
        raise Refused(
            f"it needs {', '.join(missing)}; available are {', '.join(offered)}",
            "add a column with that name to the data, or give the parameter a default",
        )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(offered)
    return {p.name: offered[p.name] for p in parameters if p.name in offered}


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


def _requests() -> IO[str]:
    """Return the real stdin, and give the user's code an empty one."""
    mine = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return mine


def main(path: str, name: str, setting: str, timeout_s: str) -> None:
    """Answer requests until stdin closes."""
    requests = _requests()
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
