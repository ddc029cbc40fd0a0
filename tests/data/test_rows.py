"""A row becomes its conversation, prompt, pair or label unchanged, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tasks.data.kinds import asked, content_id, labelled, preference, side_id
from tasks.data.messages import Columns, Unusable, conversation

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


def test_rows_become_their_conversations() -> None:
    """Messages pass unchanged; ShareGPT's turns and columns of text are read."""
    whole = [SYSTEM, USER, ANSWER]
    for messages in ([USER, ANSWER], whole, [USER, ANSWER, USER, ANSWER]):
        assert conversation({"messages": messages}, Columns()) == messages
    for human, gpt in (("human", "gpt"), ("Human", "ChatGPT")):
        turns = [{"from": "system", "value": "be kind"}, {"from": human, "value": "hi"},
                 {"from": gpt, "value": "hello"}]  # fmt: skip
        columns = Columns().among(["id", "conversations"])
        assert conversation({"conversations": turns}, columns) == whole
        assert conversation({"messages": turns}, Columns()) == whole
    for columns, there, chosen in (
        (Columns(), ["messages", "conversations"], "messages"),
        (Columns(messages="chat"), ["conversations"], "chat"),
        (Columns(messages=None), ["conversations"], None),
    ):
        assert columns.among(there).messages == chosen

    columns = Columns(messages=None, prompt="q", response="a", system="s")
    for row, read in (
        ({"q": "hi", "a": " hello\n", "s": "be kind"}, [SYSTEM, USER, answer(" hello\n")]),
        ({"q": "hi", "a": "hello", "s": None}, [USER, ANSWER]),
    ):
        assert conversation(row, columns) == read
    columns = Columns(system="s")
    assert conversation({"messages": [USER, ANSWER], "s": "be kind"}, columns) == whole
    assert conversation({"messages": whole, "s": "be rude"}, columns) == whole


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
        ({"messages": [USER, {"from": "function_call", "value": "{}"}]}, "message 2"),
        ({"messages": [USER, narrator]}, "'narrator'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "'tool'"),
        ({"messages": [USER]}, "last message is by 'user'"),
        ({"messages": [SYSTEM, ANSWER]}, "message 2 is by 'assistant'"),
        ({"messages": [USER, USER]}, "message 2 is by 'user'"),
        ({"messages": [USER, SYSTEM, ANSWER]}, "message 2 is by 'system'"),
        ({"messages": [USER, answer("  ")]}, "message 2 is an empty"),
        ({"messages": [USER, {**ANSWER, "content": None}]}, "message 2 has no 'content'"),
        ({"messages": [{"role": [], "content": "x"}]}, "role of message 1"),
    ):
        wrong += refusals(partial(conversation, row, Columns()), named)
    bare = {"prompt": "x", "response": "y"}
    assert conversation(bare, Columns(system="s")) == conversation(bare, Columns())
    assert wrong == []


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
        ({"prompt": "x", "answer": ["4"]}, "'answer'"),
        ({"prompt": "x", "answer": True}, "'answer'"),
        ({"prompt": "x", "answer": "\ud800"}, "surrogate"),
        ({"prompt": "x", "score": float("nan")}, "'score'"),
    ):
        wrong += refusals(partial(asked, values, Columns()), named)
    assert wrong == []


def test_pairs_of_all_shapes() -> None:
    for row in (
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
    ):  # fmt: skip
        assert preference(row, Columns()) == WANTED
    sharegpt = {
        "conversations": [{"from": "human", "value": "q"}],
        "chosen": {"from": "gpt", "value": "good"},
        "rejected": {"from": "gpt", "value": "bad"},
    }
    columns = Columns().among(sharegpt)
    assert preference(sharegpt, columns) == WANTED
    asked = [SYSTEM, user("q")]
    row = {"prompt": "q", "s": "be kind", "chosen": "good", "rejected": "bad"}
    assert preference(row, Columns(system="s")) == {**WANTED, "prompt": asked}
    row = {"prompt": asked, "chosen": [user("q"), answer("good")],
           "rejected": [SYSTEM, user("q"), answer("bad")]}  # fmt: skip
    assert preference(row, Columns()) == {**WANTED, "prompt": asked}


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
        ({"chosen": [answer("x"), user("y")]}, "'chosen'"),
        ({"prompt": [user("q"), answer("a")]}, "message 3"),
        ({"m": "much"}, "'m'"),
        ({"m": float("nan")}, "'m'"),
        ({"m": None}, "'m'"),
    ):
        row = {"prompt": "q", "chosen": "good", "rejected": "bad", "m": 1, **changes}
        wrong += refusals(partial(preference, row, Columns(margin="m")), named)
    alone = [user("a"), answer("b")]
    other = [user("c"), answer("b")]
    turn = "\n\nHuman: a\n\nAssistant: "
    for row, named in (
        ({"rejected": "x"}, "'chosen'"),
        ({}, "'chosen', no 'rejected'"),
        ({"chosen": "x", "rejected": "y"}, "'chosen'"),
        ({"chosen": turn, "rejected": f"{turn}b"}, "'chosen'"),
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


def test_ids_are_of_texts_and_equal_prompts_share_a_side() -> None:
    def identity(*messages: dict[str, str]) -> str:
        return content_id({"messages": list(messages)})

    assert identity(USER, ANSWER) == identity(dict(USER), dict(ANSWER)) == "9f5c11837b4d7d03"
    assert identity(USER, ANSWER) != identity(USER, {**ANSWER, "content": "hello "})
    bare, answered = (asked(v, Columns()) for v in ({"prompt": "x"}, {"prompt": "x", "answer": 1}))
    assert side_id(bare) == side_id(answered)
    other = {**WANTED, "rejected": [answer("worse")]}
    assert side_id(WANTED) == side_id(other)
    assert content_id(WANTED) != content_id(other) != content_id({**other, "margin": 1.0})
    assert side_id(WANTED) != side_id({**WANTED, "prompt": [user("z")]})
