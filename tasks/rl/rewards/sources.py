"""The interface of a reward source, and the validation of the rewards that it returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tasks.core.errors import RewardError
from tasks.rl.experience.responses import Response

SHOWN = 200
"""Characters of a prompt or response in an error."""


class Source(Protocol):
    """Returns a reward for every response."""

    @property
    def label(self) -> str:
        """Name of the source in errors, such as `reward.function=judge.py:score`."""
        ...

    def __call__(self, responses: Sequence[Response]) -> list[float]:
        """Return the reward of each response; there is at least one.

        Raises:
            RewardError: names the source and a prompt.
        """
        ...

    def close(self) -> None:
        """Free its resources."""
        ...


@dataclass(frozen=True)
class Weighted:
    """A source and its weight in the sum.

    Attributes:
        name: name of the part: `model`, `function` or `url`, as in section `reward`.
        weight: factor of its rewards.
        source: the source.
    """

    name: str
    weight: float
    source: Source


def validate_rewards(rewards: object, responses: Sequence[Response], label: str) -> list[float]:
    """Return a source's rewards if they are one finite number per response.

    Args:
        rewards: a list; true and false count as 1 and 0.
        responses: the scored responses.
        label: name of the source in errors.

    Raises:
        RewardError: not a list, the wrong number of rewards, or a reward that is not finite.
    """
    if not isinstance(rewards, list):
        shown = str(rewards)[:SHOWN]
        raise RewardError(
            f"{label} gave {shown!r} ({type(rewards).__name__}), not a list of numbers",
            details=error_details(responses[0]),
            hint="return a list with a number for each completion",
        )
    if len(rewards) != len(responses):
        raise RewardError(
            f"{label} gave {len(rewards)} rewards for {len(responses)} responses",
            details=["the first of them:", *error_details(responses[0])],
            hint="return exactly one number for each completion, in their order",
        )
    wrong = [number for number, value in enumerate(rewards) if not _is_finite_number(value)]
    if wrong:
        first = responses[wrong[0]]
        raise RewardError(
            f"{label} gave {str(rewards[wrong[0]])[:SHOWN]} for {describe(first)}",
            details=[
                *error_details(first),
                f"{len(wrong)} of {len(responses)} rewards are no finite numbers",
            ],
            hint="a reward is a finite number; where a rule does not apply, give 0",
        )
    return [float(value) for value in rewards]


def describe(response: Response) -> str:
    """Return a short description of a response: the id of its row and the start of its prompt."""
    return f"{response.prompt.row.get('id', 'a row without id')}: {_last_message(response)[:60]!r}"


def error_details(response: Response) -> list[str]:
    """Return the lines of an error that show a response."""
    return [
        f"row: {response.prompt.row.get('id')}",
        f"prompt: {_shortened(_last_message(response))}",
        f"response: {_shortened(response.text)}",
    ]


def _last_message(response: Response) -> str:
    messages = response.prompt.messages
    return str(messages[-1]["content"]) if messages else ""


def _shortened(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")


def _is_finite_number(value: object) -> bool:
    if not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int with hundreds of digits
        return False
