"""`reward.function=exact_match`: 1 for a reply that is the row's answer, else 0."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.core.errors import RewardError
from tasks.rl.experience.responses import Reply
from tasks.rl.rewards.sources import about
from tasks.serving.text import matches

EXACT_MATCH = "exact_match"
ANSWER = "answer"
"""The column that it compares with."""


class ExactMatch:
    """Compares as the served model is judged: surrounding blanks apart."""

    who = f"reward.function={EXACT_MATCH}"

    def __call__(self, replies: Sequence[Reply]) -> list[float]:
        """1 or 0 for each reply.

        Raises:
            RewardError: a row has no `answer`.
        """
        for reply in replies:
            if not isinstance(reply.prompt.row.get(ANSWER), str):
                raise RewardError(
                    f"{self.who}: row {reply.prompt.row.get('id')} has no text {ANSWER!r}",
                    details=about(reply),
                    hint=f"give every row of the data an {ANSWER!r}, or take another function",
                )
        return [float(matches(one.text, one.prompt.row[ANSWER])) for one in replies]

    def close(self) -> None:
        """Holds nothing."""
