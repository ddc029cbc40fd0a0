"""`reward.function=path.py:name`: a Python function of the user, with the signature of TRL.

`eval.function` has the same signature.

    def score(prompts, completions, completion_ids, **columns) -> list[float]

All arguments are lists with one element per response: `prompts` conversations (lists of messages),
`completions` conversations of one assistant message, `completion_ids` token ids, and every column
of the data by its name (`answer`, `id`, ...). The function names those it wants, or takes all with
`**kwargs`. It may be `async`. It returns one number per response; true and false are numbers.

Unlike in TRL, None is an error, and there are no `trainer_state`, `log_extra` and `log_metric`: the
function runs in a process of its own, which is killed if it hangs.
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
from tasks.rl.experience.responses import Response
from tasks.rl.rewards.reference import FunctionReference
from tasks.rl.rewards.sources import describe, error_details, validate_rewards

OWN_NAMES = ("prompt", "completion", "prompts", "completions", "completion_ids")
"""Columns that are not passed on: their names are those of arguments."""
GRACE_S = 2.0
"""Seconds after the timeout in which the child reports where the function hangs."""
SEARCH_S = 10.0
"""Seconds to search for the response that makes a function fail."""


class Function:
    """A function in a child process, which restarts after it was killed.

    Args:
        reference: file and name of the function.
        timeout_s: per call, including the imports of its file.
        log: gets the function's output.
        log_path: file for the complete output.

    Raises:
        ConfigError: the file does not exist or has no such name.
    """

    def __init__(
        self, reference: FunctionReference, *, timeout_s: float, log: Log, log_path: Path
    ) -> None:
        reference.require()
        self.label = f"{reference.setting}={reference}"
        self._section = reference.setting.partition(".")[0]
        program = "tasks.rl.rewards.function_child"
        self._argv = python_child(program, str(reference.path), reference.name, reference.setting)
        self._timeout_s, self._log, self._log_path = timeout_s, log, log_path
        self._child: Conversation | None = None

    def start(self) -> None:
        """Start the child without waiting for it."""
        if self._child is None:
            child = Conversation(self._argv, stage="reward", log=self._log, log_path=self._log_path)
            self._child = child.__enter__()

    def load(self) -> None:
        """Wait until the function's file is imported.

        Raises:
            RewardError: the import fails or hangs, or the name is not a function.
        """
        answer = self._ask(None, "while the file was imported")
        if "failure" in answer:
            what, *trace = answer["failure"]
            raise RewardError(
                f"{self.label} cannot be loaded: {what}", details=trace, hint=answer["hint"]
            )

    def __call__(self, responses: Sequence[Response]) -> list[float]:
        """Call the function once with all responses.

        Raises:
            RewardError: it raised, hung, ended its process, or did not return one finite number per
                response.
        """
        answer = self._ask(
            self._keywords(responses), f"on {_several(responses)}", *error_details(responses[0])
        )
        if "failure" in answer:
            raise self._raised(answer, responses)
        return validate_rewards(answer["given"], responses, self.label)

    def close(self) -> None:
        """Kill the child."""
        child, self._child = self._child, None
        if child is not None:
            child.__exit__(None, None, None)

    def _keywords(self, responses: Sequence[Response]) -> dict[str, Any]:
        rows = [response.prompt.row for response in responses]
        names = dict.fromkeys(name for row in rows for name in row if name not in OWN_NAMES)
        return {
            "prompts": [response.prompt.messages for response in responses],
            "completions": [
                [{"role": "assistant", "content": response.text}] for response in responses
            ],
            "completion_ids": [response.generated.ids.tolist() for response in responses],
            **{name: [row.get(name) for row in rows] for name in names},
        }

    def _ask(self, keywords: dict[str, Any] | None, when: str, *details: str) -> dict[str, Any]:
        self.start()
        assert self._child is not None
        request = {"timeout_s": self._timeout_s, "keywords": keywords}
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
            raise RewardError(
                f"{self.label} {what}{status} {when}",
                details=[*details, "its last lines of output:", *error.details],
                hint=f"{self._section}.timeout_s=<more> if it needs that long" if slow else "",
            ) from error

    def _raised(self, answer: dict[str, Any], responses: Sequence[Response]) -> RewardError:
        """Return the error for an exception, with the response that causes it if one alone does."""
        what, *trace = answer["failure"]
        culprit = self._culprit(responses)
        where = f"on {_several(responses)}" if culprit is None else f"for {describe(culprit)}"
        return RewardError(
            f"{self.label} failed {where}: {what}",
            details=[*error_details(responses[0] if culprit is None else culprit), *trace],
            hint=answer["hint"],
        )

    def _culprit(self, responses: Sequence[Response]) -> Response | None:
        """Return the first response that fails by itself; None if there is none, or no time."""
        until = time.monotonic() + SEARCH_S
        for response in responses:
            if time.monotonic() > until:
                return None
            if "failure" in self._ask(
                self._keywords([response]), f"for {describe(response)}", *error_details(response)
            ):
                return response
        return None


def _several(responses: Sequence[Response]) -> str:
    first = f", first {describe(responses[0])}"
    return f"{len(responses)} responses{first}" if len(responses) > 1 else describe(responses[0])
