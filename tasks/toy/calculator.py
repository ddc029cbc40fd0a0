"""A task that needs a tool: add two numbers with a calculator.

    user       Add: 47 + 85
    assistant  =47+85     the policy calls the calculator
    user       132        the environment answers
    assistant  132        the policy answers; reward 1

`Calculator` is what `rl.environment` names; `demonstration` and `question` are rows for SFT and RL.
The demonstrations show the format but no habit: most of them answer without the calculator, which a
small model can only guess. So a model after SFT mostly guesses, and RL has to find out what pays.
"""

from __future__ import annotations

import hashlib
import re
from random import Random
from typing import Any

_CALL = re.compile(r"= *(\d+) *\+ *(\d+)")
_HELD_OUT_IN_TEN, _CALLED_IN_TEN = 2, 4


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
    """Return `size` different pairs of numbers from 10 to 99; ValueError if there are fewer."""
    numbers = range(10, 100)
    pairs = [
        (a, b)
        for a in numbers
        for b in numbers
        if (_digit("held out", (a, b)) < _HELD_OUT_IN_TEN) == held_out
    ]
    if size > len(pairs):
        raise ValueError(f"{size} sums asked for, the calculator has {len(pairs)} in this split")
    Random(f"sums {seed}").shuffle(pairs)
    return pairs[:size]


def demonstration(pair: tuple[int, int]) -> dict[str, Any]:
    """Return a conversation for SFT; a hash decides whether the calculator is used."""
    question, *calls, answer = solved(pair)
    called = _digit("demonstration", pair) < _CALLED_IN_TEN
    return _row([question, *(calls if called else ()), answer])


def question(pair: tuple[int, int]) -> dict[str, Any]:
    """Return a prompt for online training, with the column that the environment reads."""
    return {**_row(solved(pair)[:1]), "columns": {"total": str(sum(pair))}}


def solved(pair: tuple[int, int]) -> list[str]:
    """Return the texts of a conversation with the calculator."""
    a, b = pair
    return [f"Add: {a} + {b}", f"={a}+{b}", str(a + b), str(a + b)]


def _row(contents: list[str]) -> dict[str, Any]:
    roles = ("user", "assistant") * 2
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return {"task": "calculator", "messages": messages}


def _digit(salt: str, pair: tuple[int, int]) -> int:
    return hashlib.sha256(f"{salt} {pair[0]}+{pair[1]}".encode()).digest()[0] % 10
