"""The toy world: right answers are right, splits do not overlap, a seed fixes everything."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tasks.toy.splits import TASK_NAMES, Example, corpus, draw, examples, is_held_out, write_dataset


def _solve(task: str, prompt: str) -> str:
    """Return the right answer, computed from the text of the prompt."""
    letters = prompt.partition(": ")[2].split()
    solved = {
        "copy": letters,
        "reverse": letters[::-1],
        "sort": sorted(letters),
        "double": letters * 2,
        "first": letters[:1],
        "last": letters[-1:],
        "count": [str(len(letters))],
        "vowels": [letter for letter in letters if letter in "aeiou"],
    }
    if task in solved:
        return " ".join(solved[task])
    thing = prompt.split()[-1]
    return f"Of course, here is the {thing}." if task == "polite" else f"No, get your own {thing}."


@pytest.fixture(scope="module")
def drawn() -> list[Example]:
    rng = Random(7)
    return [draw(rng, held_out=bool(number % 2)) for number in range(2000)]


def test_right_answers_are_right(drawn: list[Example]) -> None:
    assert {example.task for example in drawn} == set(TASK_NAMES)
    assert [e.answer for e in drawn] == [_solve(e.task, e.prompt) for e in drawn]


def test_no_subject_is_on_both_sides_and_the_seed_decides_everything() -> None:
    train = examples(2000, seed=0, held_out=False)
    assert train[:50] == examples(50, seed=0, held_out=False)
    assert train[:50] != examples(50, seed=1, held_out=False)
    held_out = examples(300, seed=0, held_out=True)
    taught = {prompt for prompt, _ in corpus(2000, seed=0)}
    assert not any(is_held_out(e.subject) for e in train)
    assert all(is_held_out(e.subject) for e in held_out)
    assert not {e.subject for e in train} & {e.subject for e in held_out}
    assert not taught & {e.prompt for e in held_out}


def _toy(out: Path, rows: str, split: str) -> list[dict[str, Any]]:
    write_dataset(out, {"train": 300, "heldout": 40}, seed=0, rows=rows)
    return [json.loads(line) for line in (out / f"{split}.jsonl").read_text().splitlines()]


def test_pairs_prefer_the_right_answer_and_labels_say_whether_it_is_right(tmp_path: Path) -> None:
    for split, count in (("train", 300), ("heldout", 40)):
        rows = _toy(tmp_path, "pairs", split)
        assert len(rows) == count
        for row in rows:
            (question,), (chosen,), (rejected,) = row["prompt"], row["chosen"], row["rejected"]
            right = _solve(row["task"], question["content"])
            assert chosen["content"] == right != rejected["content"]
    rows = _toy(tmp_path, "labelled", "train")
    for row in rows:
        question, answer = (m["content"] for m in row["messages"])
        assert (answer == _solve(row["task"], question)) is row["desirable"]
    assert 100 < sum(row["desirable"] for row in rows) < 200
