"""What a source of rewards is, and what none of them may give: anything that is not a number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tasks.core.errors import RewardError
from tasks.rl.experience.responses import Reply

SHOWN = 200
"""Characters of a prompt or a reply in an error."""


class Source(Protocol):
    """Gives every reply a number."""

    @property
    def who(self) -> str:
        """The source in errors, such as `reward.function=judge.py:score`."""
        ...

    def __call__(self, replies: Sequence[Reply]) -> list[float]:
        """The reward of each reply; `replies` are at least one.

        Raises:
            RewardError: naming the source and a prompt.
        """
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...


@dataclass(frozen=True)
class Weighted:
    """A source with its place in the sum.

    Attributes:
        name: of the part: `model`, `function` or `url`, as in section `reward`.
        weight: what its rewards are multiplied by.
        source: who gives them.
    """

    name: str
    weight: float
    source: Source


def checked(given: object, replies: Sequence[Reply], who: str) -> list[float]:
    """What a source gave, once it is one finite number a reply.

    Args:
        given: a list; true and false count as 1 and 0.
        replies: those it was asked for.
        who: the source, for the error.

    Raises:
        RewardError: it is not.
    """
    if not isinstance(given, list):
        shown = str(given)[:SHOWN]
        raise RewardError(
            f"{who} gave {shown!r} ({type(given).__name__}), not a list of numbers",
            details=about(replies[0]),
            hint="return a list with a number for each completion",
        )
    if len(given) != len(replies):
        raise RewardError(
            f"{who} gave {len(given)} rewards for {len(replies)} replies",
            details=["the first of them:", *about(replies[0])],
            hint="return exactly one number for each completion, in their order",
        )
    wrong = [number for number, value in enumerate(given) if not _is_finite_number(value)]
    if wrong:
        first = replies[wrong[0]]
        raise RewardError(
            f"{who} gave {str(given[wrong[0]])[:SHOWN]} for {named(first)}",
            details=[
                *about(first),
                f"{len(wrong)} of {len(replies)} rewards are no finite numbers",
            ],
            hint="a reward is a finite number; where a rule does not apply, give 0",
        )
    return [float(value) for value in given]


def named(reply: Reply) -> str:
    """A reply's prompt in a few words: the id of its row, and how what was asked begins."""
    return f"{reply.prompt.row.get('id', 'a row without id')}: {_asked(reply)[:60]!r}"


def about(reply: Reply) -> list[str]:
    """The lines of an error that show a reply."""
    return [
        f"row: {reply.prompt.row.get('id')}",
        f"prompt: {_shortened(_asked(reply))}",
        f"reply: {_shortened(reply.text)}",
    ]


def _asked(reply: Reply) -> str:
    messages = reply.prompt.messages
    return str(messages[-1]["content"]) if messages else ""


def _shortened(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")


def _is_finite_number(value: object) -> bool:
    if not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False
