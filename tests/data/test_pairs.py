"""Preference pairs and labelled answers: formats of datasets, and refused rows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.data.columns import Columns
from tasks.data.kinds import KINDS, PAIRS, PROMPTS, TEXTS, content_id, kind_for, side_id
from tasks.data.messages import Unusable, transcript
from tasks.data.pairs import labelled, preference
from tasks.rl.algorithms.registry import ALGORITHMS
from tasks.training.objectives import kind_of


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "be kind"}
WANTED = {"prompt": [user("q")], "chosen": [answer("good")], "rejected": [answer("bad")]}


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


@pytest.mark.parametrize(("raw", "margin"), [(1, 1.0), (-0.5, -0.5), ("0.25", 0.25)])
def test_margins(raw: object, margin: float) -> None:
    row = {"prompt": "q", "chosen": "good", "rejected": "bad", "m": raw}
    assert preference(row, Columns(margin="m")) == {**WANTED, "margin": margin}
    assert preference(row, Columns()) == WANTED


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"chosen": None}, "'chosen' must be a list of messages, found null"),
        ({"chosen": 3}, "'chosen' must be a list of messages, found a number"),
        ({"chosen": ""}, "'chosen' is empty: there is no answer to learn"),
        ({"rejected": "good"}, "'chosen' and 'rejected' are equal: nothing to prefer"),
        ({"prompt": 3}, "'prompt' must be a list of messages, found a number"),
        ({"prompt": []}, "'prompt' is an empty list"),
        ({"chosen": [answer("x"), answer("y")]}, "message 3 is by 'assistant', expected 'user'"),
        ({"chosen": [user("z"), answer("x")]},
         "'chosen' is a conversation that does not begin with the row's prompt"),
        ({"chosen": [user("q")]}, "'chosen' has no answer after the prompt"),
        ({"chosen": [answer("x"), user("y")]},
         "'chosen' must begin and end with an answer after the prompt"),
        ({"prompt": [user("q"), answer("a")]}, "message 3 is by 'assistant', expected 'user'"),
        ({"m": "much"}, "'m' must be a finite number, found 'much'"),
        ({"m": True}, "'m' must be a finite number, found true or false"),
        ({"m": float("nan")}, "'m' must be a finite number, found nan"),
        ({"m": None}, "'m' must be a finite number, found null"),
    ],
)  # fmt: skip
def test_unusable_pairs_have_a_reason(changes: dict[str, Any], reason: str) -> None:
    row = {"prompt": "q", "chosen": "good", "rejected": "bad", "m": 1, **changes}
    with pytest.raises(Unusable) as caught:
        preference(row, Columns(margin="m"))
    assert str(caught.value) == reason


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"rejected": "x"}, "no 'chosen'"),
        ({}, "no 'chosen', no 'rejected'"),
        ({"chosen": "x", "rejected": "y"},
         "'chosen' is a text, and there is no prompt to go with it"),
        ({"chosen": [user("a"), answer("b")], "rejected": [user("c"), answer("b")]},
         "the two conversations differ first at message 1, which is not an answer"),
        ({"chosen": [user("a"), answer("b"), user("c"), answer("d")],
          "rejected": [user("a"), answer("b"), user("e"), answer("d")]},
         "the two conversations differ first at message 3, which is not an answer"),
    ],
)  # fmt: skip
def test_unusable_pairs_without_a_prompt_have_a_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unusable) as caught:
        preference(row, Columns())
    assert str(caught.value) == reason


@pytest.mark.parametrize(
    ("raw", "flag"),
    [(True, True), (False, False), (1, True), (0, False), ("true", True), ("False", False)],
)  # fmt: skip
def test_labels(raw: object, flag: bool) -> None:
    row = {"prompt": "q", "response": "a", "label": raw}
    labelled_row = labelled(row, Columns())
    assert labelled_row == {"messages": [user("q"), answer("a")], "desirable": flag}


@pytest.mark.parametrize("raw", ["good", 2, 0.5, None, [True], ""])
def test_labels_that_are_none(raw: object) -> None:
    with pytest.raises(Unusable, match="'label' must be true or false, found "):
        labelled({"prompt": "q", "response": "a", "label": raw}, Columns())
    with pytest.raises(Unusable, match="no 'label', the column of the label"):
        labelled({"prompt": "q", "response": "a"}, Columns())


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
