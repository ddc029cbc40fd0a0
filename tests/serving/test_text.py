from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.serving.text import LOOP_REPEATS, LOOP_TOKENS, MAX_BLOCK, exact_match, is_degenerate

BLOCKS = st.lists(st.integers(0, 5), min_size=1, max_size=MAX_BLOCK)


@pytest.mark.parametrize(
    ("tokens", "caught"),
    [
        ([], False),
        ([3] * 15, False),
        ([3] * 16, True),
        ([1, 2] * 7, False),
        ([1, 2] * 8, True),
        (list(range(10)) * 3, False),
        (list(range(10)) * 4, True),
        ([8, 9, *[3] * 16, 4], True),
        (list(range(200)), False),
    ],
)
def test_is_degenerate(tokens: list[int], caught: bool) -> None:
    assert is_degenerate(tokens) is caught


@given(st.lists(st.integers(0, 9), max_size=20), BLOCKS, st.lists(st.integers(0, 9), max_size=20))
def test_a_loop_is_found_wherever_it_stands(
    before: list[int], block: list[int], after: list[int]
) -> None:
    repeats = max(LOOP_REPEATS, -(-LOOP_TOKENS // len(block)))
    assert is_degenerate([*before, *block * repeats, *after])


def has_a_loop(tokens: list[int]) -> bool:
    """The definition itself: a block repeated often enough over enough tokens."""
    for block in range(1, MAX_BLOCK + 1):
        repeats = max(LOOP_REPEATS, -(-LOOP_TOKENS // block))
        for start in range(len(tokens) - block * repeats + 1):
            if tokens[start : start + block * repeats] == tokens[start : start + block] * repeats:
                return True
    return False


@given(st.lists(st.integers(0, 1), max_size=40))
def test_nothing_else_is_taken_for_a_loop(tokens: list[int]) -> None:
    assert is_degenerate(tokens) is has_a_loop(tokens)


@given(st.lists(st.integers(), max_size=LOOP_TOKENS - 1))
def test_short_sequences_are_never_degenerate(tokens: list[int]) -> None:
    assert not is_degenerate(tokens)


def test_exact_match() -> None:
    assert exact_match(["tac", " dog\n", "x"], ["tac", "dog", "y"]) == pytest.approx(2 / 3)
    assert exact_match(["A"], ["a"]) == 0.0
    with pytest.raises(ValueError, match="no text"):
        exact_match([], [])
    with pytest.raises(ValueError, match="shorter"):
        exact_match(["a", "b"], ["a"])
