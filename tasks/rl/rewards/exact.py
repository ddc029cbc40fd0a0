"""`reward.function=exact_match`: 1 if the response is the row's answer, else 0."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.core.errors import RewardError
from tasks.rl.experience.responses import Response
from tasks.rl.rewards.sources import error_details
from tasks.serving.text import matches

EXACT_MATCH = "exact_match"
ANSWER = "answer"
"""Column with the answer."""


class ExactMatch:
    """Compares texts as smoke_eval does, without leading and trailing whitespace."""

    label = f"reward.function={EXACT_MATCH}"

    def __call__(self, responses: Sequence[Response]) -> list[float]:
        """Return 1 or 0 for each response.

        Raises:
            RewardError: a row has no `answer`.
        """
        for response in responses:
            if not isinstance(response.prompt.row.get(ANSWER), str):
                raise RewardError(
                    f"{self.label}: row {response.prompt.row.get('id')} has no text {ANSWER!r}",
                    details=error_details(response),
                    hint=f"give every row of the data an {ANSWER!r}, or use another function",
                )
        return [
            float(matches(response.text, response.prompt.row[ANSWER])) for response in responses
        ]

    def close(self) -> None:
        """Nothing to close."""
