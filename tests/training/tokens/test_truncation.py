"""Truncation: samples cut, refused and counted."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.core.errors import DataError
from tasks.training.tokens.examples import Example, Tokens
from tasks.training.tokens.truncation import Tally, fit, refuse_truncated, truncation


def sample(name: str, *lengths: int, prompt: int = 5, start: int = 0) -> Example:
    """Make sequences with a common prompt and answers of different numbers."""
    made = []
    for role, length in enumerate(lengths):
        tail = [start + 1000 * role + i for i in range(length - prompt)]
        bears = [i >= prompt for i in range(length)]
        made.append(Tokens([*range(prompt), *tail], bears))
    return Example(name, tuple(made))


def problem(tally: Tally) -> DataError:
    error = tally.problem("s")
    assert error is not None
    return error


class TestTruncation:
    def run(self, max_len: int, rule: str, *examples: Example) -> tuple[list[list[int]], Tally]:
        tally = Tally()
        kept = [
            each
            for example in examples
            for each in fit(example, tally, max_len=max_len, on_overlong=rule)
        ]
        return [[len(s.ids) for s in each.sequences] for each in kept], tally

    def account(self, *lengths: int, rule: str = "truncate") -> dict[str, Any]:
        """Return the counts of samples of these lengths, under a limit of 10."""
        examples = [sample(str(n), length) for n, length in enumerate(lengths)]
        return self.run(10, rule, *examples)[1].event(10)

    def test_tokens_cut_are_counted_and_sufficient_limits_named(self) -> None:
        few = self.account(*[10] * 98, 30, 400)
        assert (few["truncated"], few["tokens_cut"], few["ends_cut"]) == (2, 410, 2)
        assert (few["fits_99"], few["fits_all"]) == (30, 400)
        warning = truncation(few, max_len=10)
        for number in ("2 of 100", "train.max_len=30", "train.max_len=400"):
            assert number in warning
        assert truncation(self.account(*[10] * 99, 30), max_len=10) == ""  # 1 % is no warning
        none = self.account(10, 9)
        assert (none["fits_99"], none["fits_all"], truncation(none, max_len=10)) == (0, 0, "")

    def test_lengths_are_counted_before_anything_is_cut(self) -> None:
        assert self.account(7, 8, 9, 400)["lengths"] == [(8, 2), (9, 1), (430, 1)]
        assert self.account(7, 12, rule="refuse")["lengths"] == [(8, 1), (13, 1)]

    def refuse(self, counts: dict[str, Any], *, most: float = 0.2, texts: bool = False) -> None:
        refuse_truncated(counts, source="train.jsonl", max_len=10, most=most, texts=texts)

    def test_too_many_truncated_rows_are_refused(self) -> None:
        self.refuse(self.account(10, 10, 10, 10, 12))
        cut = self.account(10, 10, 30, 12, 12)
        with pytest.raises(DataError) as bad:
            self.refuse(cut)
        assert "train.jsonl: 3 of 5" in bad.value.message
        for setting in ("train.max_len=30", "on_overlong=refuse", "data.max_truncated=0.6"):
            assert setting in bad.value.hint
        self.refuse(cut, most=0.6)
        with pytest.raises(DataError) as bad:
            self.refuse(cut, texts=True)
        assert "train.on_overlong=split" in bad.value.hint
        self.refuse(self.account(9, 9, 12, rule="refuse"), most=0.0)  # by the user's own wish

    def test_answers_of_a_pair_are_cut_separately_and_prompts_never(self) -> None:
        cut, tally = self.run(
            10, "truncate", sample("p", 12, 9), sample("q", 14, 12), sample("r", 10)
        )
        assert cut == [[10, 9], [10, 10], [10]]
        counted = tally.event(10)
        assert (counted["kept"], counted["truncated"], counted["ends_cut"]) == (3, 2, 3)
        assert not tally.left_out

    def test_pairs_that_become_equal_are_left_out_and_counted(self) -> None:
        long = sample("p", 12, 12)
        same = long.sequences[0]
        late = Tokens([*same.ids[:-1], 99], same.bears)
        cut, tally = self.run(11, "truncate", Example("p", (same, late)), sample("q", 6, 6))
        assert cut == [[6, 6]]
        assert [tally.event(11)[n] for n in ("read", "kept", "equal", "truncated")] == [2, 1, 1, 0]
        assert [line.partition(":")[0] for line in tally.left_out] == ["p"]
        cut, tally = self.run(12, "truncate", Example("p", (same, late)))
        assert (cut, tally.counts["equal"]) == ([[12, 12]], 0)
        _, tally = self.run(11, "truncate", Example("p", (same, late)))
        assert "1 pairs" in problem(tally).message

    def test_prompts_that_fill_the_context(self) -> None:
        long = sample("p", 12, prompt=10)
        _, tally = self.run(10, "truncate", sample("x", 12), long)
        assert "first p: prompt of 10 tokens" in problem(tally).message
        assert "train.max_len=12 " in problem(tally).hint
        cut, tally = self.run(10, "refuse", sample("x", 12), long, sample("y", 9))
        assert (cut, tally.counts["refused"]) == ([[9]], 2)
        assert [line.partition(":")[0] for line in tally.left_out] == ["x", "p"]
        _, tally = self.run(10, "refuse", long)
        assert "1 too long" in problem(tally).message
