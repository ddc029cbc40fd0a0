"""`reward.function=path.py:name`: a Python function of the user's, in the form TRL gave it.

    def score(prompts, completions, completion_ids, **columns) -> list[float]

All are lists with an element a reply: `prompts` conversations (lists of messages), `completions`
conversations of one message, the assistant's, `completion_ids` token ids, and every column of the
rows by its name (`answer`, `id`, ...). The function names those it wants, or takes all with
`**kwargs`; it may be `async`. It returns a number for each; true and false are numbers.

Unlike in TRL, None is an error like NaN, and there are no `trainer_state`, `log_extra` and
`log_metric`: the function lives in a process of its own, which is ended when it hangs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.core.errors import RewardError, StageProcessError
from tasks.process.child import python_child
from tasks.process.json_worker import Conversation
from tasks.process.output import Log
from tasks.rl.experience.responses import Reply
from tasks.rl.rewards.reference import FunctionReference
from tasks.rl.rewards.sources import about, checked, named

OWN_NAMES = ("prompt", "completion", "prompts", "completions", "completion_ids")
"""Columns that are not handed on, since the arguments are called so."""
GRACE_S = 2.0
"""After its time is up the child says where the function hangs; then it is ended."""
SEARCH_S = 10.0
"""For finding the reply that a function cannot cope with."""


class Function:
    """A function in a child process, which is started anew where it was ended.

    Args:
        reference: where the function is.
        timeout_s: for one call, the file's own imports included.
        log: gets what the function prints.
        log_path: file for all of that.

    Raises:
        ConfigError: the file, or the name in it, is not there.
    """

    def __init__(
        self, reference: FunctionReference, *, timeout_s: float, log: Log, log_path: Path
    ) -> None:
        reference.require()
        self.who = f"reward.function={reference}"
        self._argv = python_child(
            "tasks.rl.rewards.function_child", str(reference.path), reference.name
        )
        self._timeout_s, self._log, self._log_path = timeout_s, log, log_path
        self._child: Conversation | None = None

    def start(self) -> None:
        """Start the child without waiting for it."""
        if self._child is None:
            child = Conversation(self._argv, stage="reward", log=self._log, log_path=self._log_path)
            self._child = child.__enter__()

    def load(self) -> None:
        """Wait until the file was imported.

        Raises:
            RewardError: it failed, hangs, or the name in it is no function.
        """
        reply = self._ask(None, "while the file was imported")
        if "failure" in reply:
            what, *trace = reply["failure"]
            raise RewardError(
                f"{self.who} cannot be loaded: {what}", details=trace, hint=reply["hint"]
            )

    def __call__(self, replies: Sequence[Reply]) -> list[float]:
        """Call it once, with all replies.

        Raises:
            RewardError: it raised, hung, ended its process, or gave something else than a finite
                number for each reply.
        """
        reply = self._ask(self._keywords(replies), f"on {_several(replies)}", *about(replies[0]))
        if "failure" in reply:
            raise self._raised(reply, replies)
        return checked(reply["given"], replies, self.who)

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            child.__exit__(None, None, None)

    def _keywords(self, replies: Sequence[Reply]) -> dict[str, Any]:
        rows = [reply.prompt.row for reply in replies]
        names = dict.fromkeys(name for row in rows for name in row if name not in OWN_NAMES)
        return {
            "prompts": [reply.prompt.messages for reply in replies],
            "completions": [[{"role": "assistant", "content": one.text}] for one in replies],
            "completion_ids": [reply.generated.ids.tolist() for reply in replies],
            **{name: [row.get(name) for row in rows] for name in names},
        }

    def _ask(self, keywords: dict[str, Any] | None, when: str, *details: str) -> dict[str, Any]:
        self.start()
        assert self._child is not None
        request = {"timeout_s": self._timeout_s, "keywords": keywords}
        try:
            return self._child.ask(request, self._timeout_s + GRACE_S)
        except StageProcessError as error:
            ended, self._child = self._child, None
            ended.__exit__(type(error), error, None)
            if error.reason == "cancelled":
                raise
            slow = error.reason == "timeout"
            what = f"took more than {self._timeout_s:g} s" if slow else "ended its process"
            status = "" if slow else f" (status {error.returncode})"
            raise RewardError(
                f"{self.who} {what}{status} {when}",
                details=[*details, "the last lines that it said:", *error.details],
                hint="reward.timeout_s=<more> where it needs that long" if slow else "",
            ) from error

    def _raised(self, reply: dict[str, Any], replies: Sequence[Reply]) -> RewardError:
        """The error for an exception: of which reply, where one alone raises it too."""
        what, *trace = reply["failure"]
        one = self._culprit(replies)
        where = f"on {_several(replies)}" if one is None else f"for {named(one)}"
        return RewardError(
            f"{self.who} failed {where}: {what}",
            details=[*about(replies[0] if one is None else one), *trace],
            hint=reply["hint"],
        )

    def _culprit(self, replies: Sequence[Reply]) -> Reply | None:
        """The first reply that fails by itself; None where none does, or time is up."""
        until = time.monotonic() + SEARCH_S
        for reply in replies:
            if time.monotonic() > until:
                return None
            if "failure" in self._ask(
                self._keywords([reply]), f"for {named(reply)}", *about(reply)
            ):
                return reply
        return None


def _several(replies: Sequence[Reply]) -> str:
    more = f", first {named(replies[0])}"
    return f"{len(replies)} replies{more}" if len(replies) > 1 else named(replies[0])
