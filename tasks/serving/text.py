"""Checks of generated text that need no model: loops, and exact match."""

from __future__ import annotations

from collections.abc import Sequence

MAX_BLOCK = 16
"""Longest repeated block that is detected, in tokens."""

LOOP_REPEATS = 4
LOOP_TOKENS = 16
"""A loop is a block repeated at least LOOP_REPEATS times in a row over at least LOOP_TOKENS tokens.
"""


def is_degenerate(tokens: Sequence[int]) -> bool:
    """Return True if a token sequence loops (see `LOOP_REPEATS`, `LOOP_TOKENS`)."""
    for block in range(1, MAX_BLOCK + 1):
        needed = max(LOOP_REPEATS, -(-LOOP_TOKENS // block)) * block - block
        same = 0
        for at in range(block, len(tokens)):
            same = same + 1 if tokens[at] == tokens[at - block] else 0
            if same >= needed:
                return True
    return False


def matches(text: str, answer: str) -> bool:
    """Return True if a text equals the answer, apart from surrounding whitespace."""
    return text.strip() == answer.strip()


def exact_match(texts: Sequence[str], answers: Sequence[str]) -> float:
    """Return the share of texts that equal their answer, apart from surrounding whitespace."""
    if not texts:
        raise ValueError("no text to compare")
    pairs = list(zip(texts, answers, strict=True))
    return sum(matches(text, answer) for text, answer in pairs) / len(pairs)
