"""A row becomes its conversation, prompt, pair or label unchanged, or is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.errors import DataError
from tasks.data.asked import asked
from tasks.data.build import Options, build_dataset
from tasks.data.columns import Columns, wrong_columns
from tasks.data.kinds import (
    CONVERSATIONS,
    KINDS,
    PAIRS,
    PROMPTS,
    TEXTS,
    content_id,
    kind_for,
    side_id,
)
from tasks.data.messages import Unusable, conversation, transcript
from tasks.data.pairs import labelled, preference
from tasks.data.readers import read_rows
from tasks.data.sources import Source
from tasks.rl.algorithms.registry import ALGORITHMS
from tasks.training.objectives import kind_of

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}
SYSTEM = {"role": "system", "content": "be kind"}
WANTED = {
    "prompt": [{"role": "user", "content": "q"}],
    "chosen": [{"role": "assistant", "content": "good"}],
    "rejected": [{"role": "assistant", "content": "bad"}],
}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def refusals(read: Callable[[], object], named: str) -> list[str]:
    """Return a line if a row is not refused, or for another reason than the one that is named."""
    try:
        row = read()
    except Unusable as error:
        return [] if named in str(error) else [f"{named}: {error}"]
    return [f"{named}: taken as {row}"]


def test_messages_pass_unchanged() -> None:
    for messages in ([USER, ANSWER], [SYSTEM, USER, ANSWER], [USER, ANSWER, USER, ANSWER]):
        assert conversation({"messages": messages}, Columns()) == messages


@pytest.mark.parametrize(
    ("human", "gpt"), [("human", "gpt"), ("user", "assistant"), ("Human", "ChatGPT")]
)
def test_sharegpt_rows_are_read(human: str, gpt: str) -> None:
    turns = [{"from": "system", "value": "be kind"}, {"from": human, "value": "hi"},
             {"from": gpt, "value": "hello"}]  # fmt: skip
    columns = Columns().among(["id", "conversations"])
    assert conversation({"conversations": turns}, columns) == [SYSTEM, USER, ANSWER]
    assert conversation({"messages": turns}, Columns()) == [SYSTEM, USER, ANSWER]


def test_the_usual_column_and_a_named_one_go_before_sharegpts() -> None:
    assert Columns().among(["messages", "conversations"]).messages == "messages"
    assert Columns(messages="chat").among(["conversations"]).messages == "chat"
    assert Columns(messages=None).among(["conversations"]).messages is None


def test_a_system_column_goes_before_messages_without_a_system_message() -> None:
    columns = Columns(system="s")
    assert conversation({"messages": [USER, ANSWER], "s": "be kind"}, columns) == [
        SYSTEM, USER, ANSWER,
    ]  # fmt: skip
    kept = conversation({"messages": [SYSTEM, USER, ANSWER], "s": "be rude"}, columns)
    assert kept == [SYSTEM, USER, ANSWER]


def test_prompt_response_and_system_become_messages() -> None:
    row = {"q": "hi", "a": " hello\n", "s": "be kind"}
    columns = Columns(messages=None, prompt="q", response="a", system="s")
    answer = {"role": "assistant", "content": " hello\n"}
    assert conversation(row, columns) == [SYSTEM, USER, answer]
    assert conversation({**row, "s": None}, columns) == [USER, answer]


def test_conversations_that_cannot_be_trained_are_refused() -> None:
    narrator = {"from": "narrator", "value": "x"}
    wrong = []
    for row, named in (
        ({}, "'messages', no 'prompt', no 'response'"),
        ({"prompt": 3, "response": "x"}, "'prompt'"),
        ({"prompt": "x", "response": None}, "'response'"),
        ({"prompt": "x", "response": " "}, "'response' is empty"),
        ({"prompt": "\ud800", "response": "x"}, "surrogate"),
        ({"messages": "x"}, "'messages' must be"),
        ({"messages": []}, "empty list"),
        ({"messages": ["x"]}, "message 1 must be an object"),
        ({"messages": [{"role": "user"}]}, "'content'"),
        ({"messages": [{"content": "x"}]}, "'role'"),
        ({"messages": [{"from": "human"}]}, "'value'"),
        ({"messages": [USER, {"from": "function_call", "value": "{}"}]}, "names no tool"),
        ({"messages": [USER, narrator]}, "'narrator'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "'tool'"),
        ({"messages": [USER]}, "last message is by 'user'"),
        ({"messages": [ANSWER]}, "message 1 is by 'assistant'"),
        ({"messages": [SYSTEM, ANSWER]}, "message 2 is by 'assistant'"),
        ({"messages": [USER, USER]}, "message 2 is by 'user'"),
        ({"messages": [USER, SYSTEM, ANSWER]}, "message 2 is by 'system'"),
        ({"messages": [USER, answer("  ")]}, "message 2 is an empty"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [1]}]}, "call 1 of message 2"),
        ({"messages": [USER, {**ANSWER, "content": None}]}, "message 2 has no 'content'"),
        ({"messages": [{"role": [], "content": "x"}]}, "role of message 1"),
    ):
        wrong += refusals(partial(conversation, row, Columns()), named)
    bare = {"prompt": "x", "response": "y"}
    wrong += refusals(partial(conversation, bare, Columns(system="s")), "'s'")
    assert wrong == []


def test_wrong_columns_name_what_is_there_and_what_is_near() -> None:
    error = wrong_columns({"promt", "respons", "n"}, CONVERSATIONS.asked(Columns()), "x.csv")
    assert error.details[0] == "columns found: n, promt, respons"
    assert error.hint == "data.prompt_key=promt data.response_key=respons"


def test_identity_depends_on_texts_and_order_only() -> None:
    def identity(*messages: dict[str, str]) -> str:
        return content_id({"messages": list(messages)})

    assert identity(USER, ANSWER) == identity(dict(USER), dict(ANSWER)) == "9f5c11837b4d7d03"
    assert identity(USER, ANSWER) != identity(USER, {**ANSWER, "content": "hello "})
    assert len(identity(USER)) == 16


def test_a_row_becomes_its_prompt() -> None:
    """With its reference answer and the columns that a reward gets, if it has them."""
    chat = [SYSTEM, USER]
    for values, row in (
        ({"messages": [USER]}, {"messages": [USER], "columns": {}}),
        ({"prompt": "hi"}, {"messages": [USER], "columns": {}}),
        (
            {"messages": chat, "level": 3, "tags": ["a", None]},
            {"messages": chat, "columns": {"level": 3, "tags": ["a", None]}},
        ),
        (
            {"messages": [USER, answer("five")], "answer": 4},
            {"messages": [USER, answer("4")], "answer": "4", "columns": {}},
        ),
        (
            {"prompt": "hi", "response": "hello", "source": "book"},
            {"messages": [USER, ANSWER], "answer": "hello", "columns": {"source": "book"}},
        ),
        ({"prompt": chat}, {"messages": chat, "columns": {}}),
        ({"prompt": "hi", "answer": None}, {"messages": [USER], "columns": {}}),
        ({"prompt": "hi", "answer": " ", "response": ""}, {"messages": [USER], "columns": {}}),
    ):
        assert asked(values, Columns()) == row
    columns = Columns(messages=None, prompt="q", response="r", system="s", answer="solution")
    values = {"q": "hi", "s": "be kind", "solution": 4.5, "answer": "travels"}
    assert asked(values, columns) == {
        "messages": [SYSTEM, USER, answer("4.5")],
        "answer": "4.5",
        "columns": {"answer": "travels"},
    }


def test_prompts_that_cannot_be_sampled_from_are_refused() -> None:
    wrong = []
    for values, named in (
        ({"text": "x"}, "'messages', no 'prompt'"),
        ({"messages": [SYSTEM]}, "user"),
        ({"messages": [USER, USER]}, "message 2"),
        ({"prompt": 4}, "'prompt'"),
        ({"prompt": "x", "response": 4}, "'response'"),
        ({"prompt": "x", "answer": ["4"]}, "'answer'"),
        ({"prompt": "x", "answer": True}, "'answer'"),
        ({"prompt": "x", "answer": "\ud800"}, "surrogate"),
        ({"prompt": "x", "score": float("nan")}, "'score'"),
    ):
        wrong += refusals(partial(asked, values, Columns()), named)
    assert wrong == []


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
    assert "3 of 63" in caught.value.message
    lines = [line.partition(": ") for line in caught.value.details]
    assert sorted(place.rpartition("/")[2] for place, _, _ in lines) == [
        "a.jsonl:31", "a.jsonl:32", "b.jsonl:31",
    ]  # fmt: skip
    splits = build("skip")["splits"].values()
    assert sum(split["refused"] for split in splits) == 3
    assert sum(split["kept"] for split in splits) == 60


def test_sharegpt_pairs_are_a_conversation_and_two_next_messages() -> None:
    row = {
        "conversations": [{"from": "human", "value": "q"}],
        "chosen": {"from": "gpt", "value": "good"},
        "rejected": {"from": "gpt", "value": "bad"},
    }
    columns = Columns().among(row)
    assert preference(row, columns) == WANTED
    assert PAIRS.used(columns) >= set(row)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": [user("q")], "chosen": "good", "rejected": "bad"},
        {"prompt": [user("q")], "chosen": [answer("good")], "rejected": [answer("bad")]},
        # UltraFeedback: whole conversations beside the prompt, or without it
        {"prompt": "q", "chosen": [user("q"), answer("good")],
         "rejected": [user("q"), answer("bad")]},
        {"chosen": [user("q"), answer("good")], "rejected": [user("q"), answer("bad")]},
        # HH: transcripts
        {"chosen": "\n\nHuman: q\n\nAssistant: good", "rejected": "\n\nHuman: q\n\nAssistant: bad"},
        {"prompt": "\n\nHuman: q", "chosen": "good", "rejected": "bad"},
    ],
)  # fmt: skip
def test_shapes(row: dict[str, Any]) -> None:
    assert preference(row, Columns()) == WANTED


def test_longer_conversations_part_at_the_first_different_answer() -> None:
    start = [SYSTEM, user("a"), answer("b"), user("c")]
    row = {"chosen": [*start, answer("d")], "rejected": [*start, answer("e")]}
    pair = preference(row, Columns())
    assert pair == {"prompt": start, "chosen": [answer("d")], "rejected": [answer("e")]}
    text = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: {}"
    row = {"chosen": text.format("d"), "rejected": text.format("e\n")}
    assert preference(row, Columns()) == {
        "prompt": start[1:], "chosen": [answer("d")], "rejected": [answer("e\n")],
    }  # fmt: skip
    # one of them goes on after the other has ended
    longer = [user("a"), answer("b"), user("c"), answer("d")]
    pair = preference({"chosen": longer, "rejected": longer[:2]}, Columns())
    assert pair == {"prompt": longer[:1], "chosen": longer[1:], "rejected": longer[1:2]}


def test_system_messages_stay_with_the_prompt() -> None:
    columns = Columns(system="s")
    row = {"prompt": "q", "s": "be kind", "chosen": "good", "rejected": "bad"}
    assert preference(row, columns)["prompt"] == [SYSTEM, user("q")]
    whole = {"prompt": [SYSTEM, user("q")], "chosen": [user("q"), answer("good")],
             "rejected": [SYSTEM, user("q"), answer("bad")]}  # fmt: skip
    assert preference(whole, Columns()) == {**WANTED, "prompt": [SYSTEM, user("q")]}


def test_pairs_that_prefer_nothing_are_refused() -> None:
    wrong = []
    for changes, named in (
        ({"chosen": None}, "'chosen' must be"),
        ({"chosen": ""}, "'chosen' is empty"),
        ({"rejected": "good"}, "are equal"),
        ({"prompt": 3}, "'prompt' must be"),
        ({"prompt": []}, "'prompt' is an empty"),
        ({"chosen": [answer("x"), answer("y")]}, "message 3"),
        ({"chosen": [user("z"), answer("x")]}, "'chosen'"),
        ({"chosen": [user("q")]}, "'chosen'"),
        ({"chosen": [answer("x"), user("y")]}, "'chosen'"),
        ({"prompt": [user("q"), answer("a")]}, "message 3"),
        ({"m": "much"}, "'m'"),
        ({"m": True}, "'m'"),
        ({"m": float("nan")}, "'m'"),
        ({"m": None}, "'m'"),
    ):
        row = {"prompt": "q", "chosen": "good", "rejected": "bad", "m": 1, **changes}
        wrong += refusals(partial(preference, row, Columns(margin="m")), named)
    alone = [user("a"), answer("b")]
    other = [user("c"), answer("b")]
    for row, named in (
        ({"rejected": "x"}, "'chosen'"),
        ({}, "'chosen', no 'rejected'"),
        ({"chosen": "x", "rejected": "y"}, "'chosen'"),
        ({"chosen": alone, "rejected": other}, "message 1"),
        ({"chosen": [*alone, *alone], "rejected": [*alone, *other]}, "message 3"),
    ):
        wrong += refusals(partial(preference, row, Columns()), named)
    assert wrong == []
    for raw, margin in ((1, 1.0), (-0.5, -0.5), ("0.25", 0.25)):
        row = {"prompt": "q", "chosen": "good", "rejected": "bad", "m": raw}
        assert preference(row, Columns(margin="m")) == {**WANTED, "margin": margin}


def test_labels() -> None:
    bare = {"prompt": "q", "response": "a"}
    flags = {True: True, False: False, "true": True, "False": False}
    for raw, flag in [*flags.items(), (1, True), (0, False)]:
        row = {"messages": [user("q"), answer("a")], "desirable": flag}
        assert labelled({**bare, "label": raw}, Columns()) == row
    wrong = []
    for raw in ("good", 2, 0.5, None, [True], ""):
        wrong += refusals(partial(labelled, {**bare, "label": raw}, Columns()), "'label'")
    assert wrong + refusals(partial(labelled, bare, Columns()), "'label'") == []


def test_transcripts_are_read_as_they_are_written() -> None:
    text = "\n\nHuman:  two\n\nlines \n\nAssistant:\n\nHuman: x"
    assert transcript(text) == [user(" two\n\nlines "), answer(""), user("x")]
    assert transcript("Human: x\n\nAssistant: y") is None
    assert transcript("Say\n\nHuman: x") is None


SAID = st.lists(st.text(min_size=1, max_size=4).filter(str.strip), min_size=2, max_size=5)


@given(texts=SAID, tail=st.text(min_size=1, max_size=3).filter(str.strip))
def test_a_pair_split_and_joined_is_the_same(texts: list[str], tail: str) -> None:
    """A pair is the same with a separate prompt and as two whole conversations."""
    prompt = [
        (user, answer)[i % 2](text) for i, text in enumerate(texts[: len(texts) // 2 * 2 - 1])
    ]
    chosen, rejected = [answer(texts[-1])], [answer(texts[-1] + tail)]
    apart = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    whole = {"chosen": [*prompt, *chosen], "rejected": [*prompt, *rejected]}
    assert preference(apart, Columns()) == preference(whole, Columns()) == apart


def test_pairs_of_one_prompt_stay_on_one_side_and_keep_ids_apart() -> None:
    other = {**WANTED, "rejected": [answer("worse")]}
    assert side_id(WANTED) == side_id(other)
    assert content_id(WANTED) != content_id(other) != content_id({**other, "margin": 1.0})
    assert side_id(WANTED) != side_id({**WANTED, "prompt": [user("z")]})


def test_every_objective_has_its_rows() -> None:
    """Kinds of rows and objectives name the same columns."""
    roles = {"conversations": ("text",), "texts": ("text",), "pairs": ("chosen", "rejected"),
             "labelled": ("text", "mismatched")}  # fmt: skip
    for name, kind in KINDS.items():
        for objective in kind.objectives:
            if kind is PROMPTS:
                assert objective in ALGORITHMS
            else:
                assert kind_of(objective).roles == roles[name], objective
            assert kind_for(objective, texts=kind is TEXTS) is kind
    from typing import get_args

    from tasks.config.choices import Objective

    assert set(get_args(Objective)) == {o for k in KINDS.values() for o in k.objectives}
    assert kind_for("dpo") is PAIRS is kind_for("dpo", texts=True)
