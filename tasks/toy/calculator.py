"""A task that needs a tool: add two numbers with a calculator.

    user       Add: 47 + 85
    assistant  = 47 + 85        the policy calls the calculator
    user       132              the environment answers
    assistant  132              the policy answers; reward 1

`Calculator` is what `rl.environment` names; `demonstration` and `question` are rows for SFT and RL.
"""

from __future__ import annotations

import hashlib
import re
from random import Random
from typing import Any

_CALL = re.compile(r"= *(\d+) *\+ *(\d+)")
_HELD_OUT_IN_TEN = 2


class Calculator:
    """Adds numbers. The right answer counts only after a call of the calculator."""

    def reset(self, total: str) -> None:
        """Begin an episode about a sum whose answer is `total`."""
        self.total, self.called = total, False

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """Return the calculator's answer to a call; else the reward of the final answer."""
        call = _CALL.fullmatch(text.strip())
        if call is None:
            return None, float(self.called and text.strip() == self.total), True
        self.called = True
        return str(int(call[1]) + int(call[2])), 0.0, False


def sums(size: int, *, seed: int, held_out: bool) -> list[tuple[int, int]]:
    """Return `size` different pairs of numbers from 10 to 99.

    Args:
        size: number of pairs.
        seed: seed of their order.
        held_out: True for held-out pairs, False for training pairs.

    Raises:
        ValueError: there are not so many pairs.
    """
    numbers = range(10, 100)
    pairs = [(a, b) for a in numbers for b in numbers if _is_held_out(a, b) == held_out]
    if size > len(pairs):
        raise ValueError(f"{size} sums asked for, the calculator has {len(pairs)} in this split")
    Random(f"sums {seed}").shuffle(pairs)
    return pairs[:size]


def demonstration(pair: tuple[int, int]) -> dict[str, Any]:
    """Return a conversation in which the calculator is used, for SFT."""
    a, b = pair
    contents = (f"Add: {a} + {b}", f"= {a} + {b}", str(a + b), str(a + b))
    roles = ("user", "assistant", "user", "assistant")
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
    return {"task": "calculator", "messages": messages}


def question(pair: tuple[int, int]) -> dict[str, Any]:
    """Return a prompt for online training, with the column that the environment reads."""
    messages = demonstration(pair)["messages"][:1]
    return {"task": "calculator", "messages": messages, "columns": {"total": str(sum(pair))}}


def _is_held_out(a: int, b: int) -> bool:
    return hashlib.sha256(f"{a}+{b}".encode()).digest()[0] % 10 < _HELD_OUT_IN_TEN
