"""Truncation: samples cut, refused and counted."""

from __future__ import annotations

from typing import Any

from tasks.core.errors import DataError
from tasks.training.tokens.examples import Example, Tokens
from tasks.training.tokens.truncation import Tally, fit, truncation


def sample(name: str, *lengths: int, prompt: int = 5) -> Example:
    """Make sequences with a common prompt and answers of different numbers."""
    made = []
    for role, length in enumerate(lengths):
        tail = [1000 * role + i for i in range(length - prompt)]
        made.append(Tokens([*range(prompt), *tail], [i >= prompt for i in range(length)]))
    return Example(name, tuple(made))


def run(rule: str, *examples: Example, max_len: int = 10) -> tuple[list[list[int]], Tally]:
    """Return the lengths of the examples that are left, and the account."""
    tally = Tally()
    fitting = [fit(each, tally, max_len=max_len, on_overlong=rule) for each in examples]
    return [[len(s.ids) for s in each.sequences] for of in fitting for each in of], tally


def account(*lengths: int, rule: str = "truncate") -> dict[str, Any]:
    """Return the counts of samples of these lengths, under a limit of 10."""
    return run(rule, *(sample(str(n), length) for n, length in enumerate(lengths)))[1].event(10)


def problem(tally: Tally) -> DataError:
    error = tally.problem("s")
    assert error is not None
    return error


def test_tokens_cut_are_counted_and_sufficient_limits_named() -> None:
    few = account(*[10] * 98, 30, 400)
    assert (few["truncated"], few["tokens_cut"], few["ends_cut"]) == (2, 410, 2)
    assert (few["fits_99"], few["fits_all"]) == (30, 400)
    warning = truncation(few, max_len=10)
    for number in ("2 of 100", "train.max_len=30", "train.max_len=400"):
        assert number in warning
    assert truncation(account(*[10] * 99, 30), max_len=10) == ""  # 1 % is no warning
    none = account(10, 9)
    assert (none["fits_99"], none["fits_all"], truncation(none, max_len=10)) == (0, 0, "")


def test_lengths_are_counted_before_anything_is_cut() -> None:
    assert account(7, 8, 9, 400)["lengths"] == [(8, 2), (9, 1), (430, 1)]
    assert account(7, 12, rule="refuse")["lengths"] == [(8, 1), (13, 1)]


def test_answers_of_a_pair_are_cut_separately_and_prompts_never() -> None:
    cut, tally = run("truncate", sample("p", 12, 9), sample("q", 14, 12), sample("r", 10))
    assert cut == [[10, 9], [10, 10], [10]]
    counted = tally.event(10)
    assert (counted["kept"], counted["truncated"], counted["ends_cut"]) == (3, 2, 3)
    assert not tally.left_out


def test_pairs_that_become_equal_are_left_out_and_counted() -> None:
    same = sample("p", 12).sequences[0]
    twins = Example("p", (same, Tokens([*same.ids[:-1], 99], same.bears)))
    cut, tally = run("truncate", twins, sample("q", 6, 6), max_len=11)
    assert cut == [[6, 6]]
    assert [tally.event(11)[n] for n in ("read", "kept", "equal", "truncated")] == [2, 1, 1, 0]
    assert [line.partition(":")[0] for line in tally.left_out] == ["p"]
    cut, tally = run("truncate", twins, max_len=12)
    assert (cut, tally.counts["equal"]) == ([[12, 12]], 0)
    assert "1 pairs" in problem(run("truncate", twins, max_len=11)[1]).message


def test_prompts_that_fill_the_context() -> None:
    long = sample("p", 12, prompt=10)
    _, tally = run("truncate", sample("x", 12), long)
    assert "first p: prompt of 10 tokens" in problem(tally).message
    assert "train.max_len=12 " in problem(tally).hint
    cut, tally = run("refuse", sample("x", 12), long, sample("y", 9))
    assert (cut, tally.counts["refused"]) == ([[9]], 2)
    assert [line.partition(":")[0] for line in tally.left_out] == ["x", "p"]
    assert "1 too long" in problem(run("refuse", long)[1]).message
