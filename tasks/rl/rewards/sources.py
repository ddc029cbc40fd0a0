"""The interface of a reward source, the validation of its rewards, and prompts in errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tasks.core.errors import RewardError
from tasks.rl.experience.responses import Prompt, Response

SHOWN = 200
"""Characters of a prompt or response in an error."""


class Source(Protocol):
    """Returns a reward for every response."""

    def __call__(self, responses: Sequence[Response]) -> list[float]:
        """Return the reward of each response, at least one; a RewardError names a prompt."""
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

    True and false count as 1 and 0.
    """
    if not isinstance(rewards, list):
        raise RewardError(
            f"{label} gave {shortened(rewards)} ({type(rewards).__name__}), not a list of numbers",
            details=error_details(responses[0].prompt, responses[0].text),
            hint="return a list with a number for each completion",
        )
    if len(rewards) != len(responses):
        raise RewardError(
            f"{label} gave {len(rewards)} rewards for {len(responses)} responses",
            details=error_details(responses[0].prompt, responses[0].text),
            hint="return exactly one number for each completion, in their order",
        )
    wrong = [number for number, value in enumerate(rewards) if not is_finite_number(value)]
    if wrong:
        first = responses[wrong[0]]
        raise RewardError(
            f"{label} gave {shortened(rewards[wrong[0]])} for {describe(first.prompt)}",
            details=[
                *error_details(first.prompt, first.text),
                f"{len(wrong)} of {len(responses)} rewards are no finite numbers",
            ],
            hint="a reward is a finite number; where a rule does not apply, give 0",
        )
    return [float(value) for value in rewards]


def is_finite_number(value: object) -> bool:
    """Return True for a finite int, float or bool."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an int with hundreds of digits
        return False


def describe(prompt: Prompt) -> str:
    """Return the id of a prompt's row and the start of its last message."""
    return f"{prompt.row.get('id', 'a row without id')}: {_last_message(prompt)[:60]!r}"


def error_details(prompt: Prompt, response: str | None = None) -> list[str]:
    """Return the lines of an error that show a prompt and its response."""
    lines = [f"row: {prompt.row.get('id')}", f"prompt: {shortened(_last_message(prompt))}"]
    return lines if response is None else [*lines, f"response: {shortened(response)}"]


def shortened(value: object) -> str:
    """Return the start of a value's representation."""
    shown = repr(value)
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."


def _last_message(prompt: Prompt) -> str:
    return str(prompt.messages[-1]["content"]) if prompt.messages else ""
