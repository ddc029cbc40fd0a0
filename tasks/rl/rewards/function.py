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

from collections.abc import Sequence
from typing import Any

from tasks.core.errors import RewardError
from tasks.rl.experience.responses import Response
from tasks.rl.rewards.sources import describe, error_details, validate_rewards
from tasks.rl.user_code import Place, UserCode
from tasks.serving.text import matches

EXACT_MATCH = "exact_match"
"""Value of `reward.function` for `ExactMatch`."""
ANSWER = "answer"
"""Column with the answer."""
OWN_NAMES = ("prompt", "completion", "prompts", "completions", "completion_ids")
"""Columns that are not passed on: their names are those of arguments."""


class Function(UserCode):
    """A function of the user as a reward source."""

    def __call__(self, responses: Sequence[Response]) -> list[float]:
        """Call the function once with all responses."""

        def place(_: str) -> Place:
            first = responses[0]
            return (
                f"on {len(responses)} responses, first {describe(first.prompt)}",
                error_details(first.prompt, first.text),
            )

        values = self.ask("call", {"": _keywords(responses)}, place)
        return validate_rewards(values[""], responses, self.label)


def _keywords(responses: Sequence[Response]) -> dict[str, Any]:
    rows = [response.prompt.row for response in responses]
    names = dict.fromkeys(name for row in rows for name in row if name not in OWN_NAMES)
    return {
        "prompts": [response.prompt.messages for response in responses],
        "completions": [response.messages for response in responses],
        "completion_ids": [response.generated.ids.tolist() for response in responses],
        **{name: [row.get(name) for row in rows] for name in names},
    }


class ExactMatch:
    """1 if the response is the row's answer, else 0; compares texts as smoke_eval does."""

    label = f"reward.function={EXACT_MATCH}"

    def __call__(self, responses: Sequence[Response]) -> list[float]:
        """Return 1 or 0 for each response; a RewardError names a row without `answer`."""
        for response in responses:
            row = response.prompt.row
            if not isinstance(row.get(ANSWER), str):
                raise RewardError(
                    f"{self.label}: row {row.get('id')} has no text {ANSWER!r}",
                    details=error_details(response.prompt, response.text),
                    hint=f"give every row of the data an {ANSWER!r}, or use another function",
                )
        return [float(matches(each.text, each.prompt.row[ANSWER])) for each in responses]

    def close(self) -> None:
        """Nothing to close."""
