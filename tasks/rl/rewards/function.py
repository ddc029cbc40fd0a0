"""`reward.function=path.py:name`: a Python function of the user, with the signature of TRL.

`eval.function` has the same signature.

    def score(prompts, completions, completion_ids, **columns) -> list[float]

All arguments are lists with one element per response: `prompts` conversations (lists of messages),
`completions` conversations of one assistant message (with an environment, of all responses and
observations), `completion_ids` the sampled token ids, and every column of the data by its name
(`answer`, `id`, ...). The function names those it wants, or takes all with
`**kwargs`. It may be `async`. It returns one number per response; true and false are numbers.

Unlike in TRL, None is an error, and there are no `trainer_state`, `log_extra` and `log_metric`: the
function runs in a process of its own, which is killed if it hangs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tasks.core.errors import RewardError
from tasks.process.output import Log
from tasks.rl.experience.responses import Response
from tasks.rl.rewards.reference import FunctionReference
from tasks.rl.rewards.sources import describe, error_details, validate_rewards
from tasks.rl.rewards.user_code import UserCode

OWN_NAMES = ("prompt", "completion", "prompts", "completions", "completion_ids")
"""Columns that are not passed on: their names are those of arguments."""
SEARCH_S = 10.0
"""Seconds to search for the response that makes a function fail."""


class Function(UserCode):
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
        section = reference.setting.partition(".")[0]
        super().__init__(
            reference,
            "tasks.rl.rewards.function_child",
            timeout_s=timeout_s,
            timeout_key=f"{section}.timeout_s",
            log=log,
            log_path=log_path,
        )

    def __call__(self, responses: Sequence[Response]) -> list[float]:
        """Call the function once with all responses.

        Raises:
            RewardError: it raised, hung, ended its process, or did not return one finite number per
                response.
        """
        answer = self.ask(
            _keywords(responses), lambda: (f"on {_several(responses)}", error_details(responses[0]))
        )
        if "failure" in answer:
            raise self._raised(answer, responses)
        return validate_rewards(answer["given"], responses, self.label)

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
            where = partial(_at, response)
            if "failure" in self.ask(_keywords([response]), where):
                return response
        return None


def _keywords(responses: Sequence[Response]) -> dict[str, Any]:
    rows = [response.prompt.row for response in responses]
    names = dict.fromkeys(name for row in rows for name in row if name not in OWN_NAMES)
    return {
        "prompts": [response.prompt.messages for response in responses],
        "completions": [response.messages for response in responses],
        "completion_ids": [response.generated.ids.tolist() for response in responses],
        **{name: [row.get(name) for row in rows] for name in names},
    }


def _at(response: Response) -> tuple[str, list[str]]:
    return f"for {describe(response)}", error_details(response)


def _several(responses: Sequence[Response]) -> str:
    first = f", first {describe(responses[0])}"
    return f"{len(responses)} responses{first}" if len(responses) > 1 else describe(responses[0])
