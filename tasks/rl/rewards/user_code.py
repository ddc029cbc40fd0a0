"""Code of the user in a child process, which is killed if it hangs and started again when needed.

`Function` (rewards) and `EnvironmentProcess` (several turns) are built on it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.core.errors import RewardError, StageProcessError
from tasks.process.child import python_child
from tasks.process.json_worker import Conversation
from tasks.process.output import Log
from tasks.rl.rewards.reference import FunctionReference

GRACE_S = 2.0
"""Seconds after the timeout in which the child reports where the code hangs."""


class UserCode:
    """A name in a file of the user, loaded by a program in a child process.

    Args:
        reference: file and name.
        program: module of the child process, which answers with `function_child.serve`.
        timeout_s: per call, including the imports of the file.
        timeout_key: setting of `timeout_s`.
        log: gets the output of the code.
        log_path: file for the complete output.
        on_event: gets the child's events besides its replies.

    Raises:
        ConfigError: the file does not exist or has no such name.
    """

    def __init__(
        self,
        reference: FunctionReference,
        program: str,
        *,
        timeout_s: float,
        timeout_key: str,
        log: Log,
        log_path: Path,
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        reference.require()
        self.label = f"{reference.setting}={reference}"
        self._argv = python_child(program, str(reference.path), reference.name, reference.setting)
        self._timeout_s, self._timeout_key = timeout_s, timeout_key
        self._log, self._log_path, self._on_event = log, log_path, on_event
        self._child: Conversation | None = None

    def start(self) -> None:
        """Start the child without waiting for it."""
        if self._child is None:
            child = Conversation(
                self._argv,
                stage="reward",
                log=self._log,
                log_path=self._log_path,
                on_event=self._on_event,
            )
            self._child = child.__enter__()

    def load(self) -> None:
        """Wait until the file is imported.

        Raises:
            RewardError: the import fails or hangs, or the name is not what it has to be.
        """
        answer = self.ask(None, lambda: ("while the file was imported", []))
        if "failure" in answer:
            what, *trace = answer["failure"]
            raise RewardError(
                f"{self.label} cannot be loaded: {what}", details=trace, hint=answer["hint"]
            )

    def close(self) -> None:
        """Kill the child."""
        child, self._child = self._child, None
        if child is not None:
            child.__exit__(None, None, None)

    def ask(
        self, arguments: dict[str, Any] | None, where: Callable[[], tuple[str, list[str]]]
    ) -> dict[str, Any]:
        """Call the code; return the child's reply, which is a `failure` if the code raised.

        Args:
            arguments: of the call, plain JSON; None only loads the file.
            where: returns, for an error, when it happened and the lines that show the prompt.

        Raises:
            RewardError: the code took too long, or ended its process.
        """
        self.start()
        assert self._child is not None
        request = {"timeout_s": self._timeout_s, "arguments": arguments}
        try:
            return self._child.ask(request, self._timeout_s + GRACE_S)
        except StageProcessError as error:
            child, self._child = self._child, None
            child.__exit__(type(error), error, None)
            if error.reason == "cancelled":
                raise
            slow = error.reason == "timeout"
            what = f"took more than {self._timeout_s:g} s" if slow else "ended its process"
            status = "" if slow else f" (status {error.returncode})"
            when, details = where()
            raise RewardError(
                f"{self.label} {what}{status} {when}",
                details=[*details, "its last lines of output:", *error.details],
                hint=f"{self._timeout_key}=<more> if it needs that long" if slow else "",
            ) from error
