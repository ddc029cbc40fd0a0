"""Prompts with and without reference answers, and the columns passed on to rewards."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import DataError
from tasks.data.asked import asked
from tasks.data.build import Options, build_dataset
from tasks.data.columns import Columns
from tasks.data.kinds import PROMPTS, side_id
from tasks.data.messages import Unusable
from tasks.data.readers import read_rows
from tasks.data.sources import Source

USER = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize(
    ("values", "row"),
    [
        ({"messages": [USER]}, {"messages": [USER], "columns": {}}),
        ({"prompt": "2 + 2?"}, {"messages": [USER], "columns": {}}),
        (
            {"messages": [SYSTEM, USER], "level": 3, "tags": ["a", None]},
            {"messages": [SYSTEM, USER], "columns": {"level": 3, "tags": ["a", None]}},
        ),
        (
            {"messages": [USER, ANSWER]},
            {"messages": [USER, ANSWER], "answer": "4", "columns": {}},
        ),
        (
            {"messages": [USER, {**ANSWER, "content": "five"}], "answer": 4},
            {"messages": [USER, ANSWER], "answer": "4", "columns": {}},
        ),
        (
            {"prompt": "2 + 2?", "response": "4", "source": "book"},
            {"messages": [USER, ANSWER], "answer": "4", "columns": {"source": "book"}},
        ),
        ({"prompt": [SYSTEM, USER]}, {"messages": [SYSTEM, USER], "columns": {}}),
        ({"prompt": "2 + 2?", "answer": None}, {"messages": [USER], "columns": {}}),
        ({"prompt": "2 + 2?", "answer": " ", "response": ""}, {"messages": [USER], "columns": {}}),
    ],
)
def test_a_row_becomes_its_prompt(values: dict[str, Any], row: dict[str, Any]) -> None:
    assert asked(values, Columns()) == row


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"text": "x"}, "no 'messages', no 'prompt'"),
        ({"messages": [SYSTEM]}, "there is no user's message to answer"),
        ({"messages": [USER, USER]}, "message 2 is by 'user', expected 'assistant'"),
        ({"prompt": 4}, "'prompt' must be text, found a number"),
        ({"prompt": "x", "response": 4}, "'response' must be text, found a number"),
        ({"prompt": "x", "answer": ["4"]}, "'answer' must be text or a number, found a list"),
        ({"prompt": "x", "answer": True}, "'answer' must be text or a number, found true or false"),
        ({"prompt": "x", "answer": "\ud800"}, "'answer' has half of a surrogate pair at 1"),
        (
            {"prompt": "x", "score": float("nan")},
            "'score' cannot be passed on to a reward: Out of range float values",
        ),
    ],
)
def test_unusable_rows_have_a_reason(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unusable) as caught:
        asked(values, Columns())
    assert str(caught.value).startswith(reason)


def test_columns_have_the_users_names() -> None:
    columns = Columns(messages=None, prompt="q", response="r", system="s", answer="solution")
    values = {"q": "2 + 2?", "s": "be brief", "solution": 4.5, "answer": "travels"}
    assert asked(values, columns) == {
        "messages": [SYSTEM, USER, {**ANSWER, "content": "4.5"}],
        "answer": "4.5",
        "columns": {"answer": "travels"},
    }


def test_a_prompt_is_on_one_side_with_and_without_its_answer() -> None:
    bare, answered = (asked(v, Columns()) for v in ({"prompt": "x"}, {"prompt": "x", "answer": 1}))
    assert side_id(bare) == side_id(answered)


def test_csv_rows_may_leave_their_answer_out(tmp_path: Path) -> None:
    lines = [f'"say, {n}",{n if n % 2 else ""},{n % 3}' for n in range(60)]
    (tmp_path / "x.csv").write_text("\n".join(["prompt,answer,level", *lines]) + "\n")

    def rows() -> Any:
        return read_rows("csv", str(tmp_path / "x.csv"))

    account = build_dataset(
        tmp_path,
        train=[Source("x.csv", rows, Columns())],
        held_out=None,
        options=Options(kind=PROMPTS, eval_fraction=0.3),
        log=logging.getLogger("tests.data"),
    )
    assert account["rows"] == "prompts"
    splits = {
        split: [json.loads(line) for line in (tmp_path / f"{split}.jsonl").open()]
        for split in ("train", "heldout")
    }
    both = splits["train"] + splits["heldout"]
    assert len(both) == 60
    assert min(map(len, splits.values())) > 5
    for row in both:
        number = int(row["messages"][0]["content"].removeprefix("say, "))
        assert row["columns"] == {"level": str(number % 3)}
        assert row.get("answer") == (str(number) if number % 2 else None)
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"][: 1 + number % 2]


@pytest.mark.parametrize("apart", [False, True])
def test_exact_match_needs_an_answer_in_every_row(apart: bool, tmp_path: Path) -> None:
    good = [{"prompt": f"say {n}", "answer": n} for n in range(60)]
    names = {"a.jsonl": [*good[:30], {"prompt": "say it"}, {"prompt": "x", "answer": " "}]}
    names["b.jsonl"] = [*good[30:], {"prompt": "say nothing", "answer": None}]
    for name, rows in names.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def build(on_bad_line: str) -> dict[str, Any]:
        first, second = (
            Source(name, lambda path=tmp_path / name: read_rows("jsonl", str(path)), Columns())
            for name in names
        )
        return build_dataset(
            tmp_path,
            train=[first] if apart else [first, second],
            held_out=second if apart else None,
            options=Options(
                kind=PROMPTS, eval_fraction=0.3, answered=True, on_bad_line=on_bad_line
            ),
            log=logging.getLogger("tests.data"),
        )

    with pytest.raises(DataError) as caught:
        build("fail")
    assert caught.value.message.startswith("3 of 63 rows cannot be used, first ")
    wrong = "no answer, and reward.function=exact_match compares with it"
    lines = [line.partition(": ") for line in caught.value.details]
    assert sorted(place.rpartition("/")[2] for place, _, _ in lines) == [
        "a.jsonl:31", "a.jsonl:32", "b.jsonl:31",
    ]  # fmt: skip
    assert {why for _, _, why in lines} == {wrong}
    splits = build("skip")["splits"].values()
    assert sum(split["refused"] for split in splits) == 3
    assert sum(split["kept"] for split in splits) == 60
