"""A row becomes its messages, unchanged, or is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.data.columns import Columns, wrong_columns
from tasks.data.kinds import CONVERSATIONS, content_id
from tasks.data.messages import Unusable, conversation

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}
SYSTEM = {"role": "system", "content": "be kind"}


@pytest.mark.parametrize(
    "messages", [[USER, ANSWER], [SYSTEM, USER, ANSWER], [USER, ANSWER, USER, ANSWER]]
)
def test_messages_pass_unchanged(messages: list[dict[str, str]]) -> None:
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


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "no 'messages', no 'prompt', no 'response'"),
        ({"prompt": "x"}, "no 'messages', no 'response'"),
        ({"prompt": 3, "response": "x"}, "'prompt' must be text, found a number"),
        ({"prompt": "x", "response": None}, "'response' must be text, found null"),
        ({"prompt": "x", "response": " "}, "'response' is empty: there is no answer to learn"),
        ({"prompt": "\ud800", "response": "x"}, "'prompt' has half of a surrogate pair at 1"),
        ({"messages": "x"}, "'messages' must be a list of messages, found text"),
        ({"messages": []}, "'messages' is an empty list"),
        ({"messages": ["x"]}, "message 1 must be an object, found text"),
        ({"messages": [{"role": "user"}]}, "message 1 has no 'content'"),
        ({"messages": [{"content": "x"}]}, "message 1 has no 'role'"),
        ({"messages": [{"from": "human"}]}, "message 1 has no 'value'"),
        (
            {"messages": [USER, {"from": "function_call", "value": "{}"}]},
            "message 2 is by 'function_call': turns of tools are not trained",
        ),
        (
            {"messages": [USER, {"from": "narrator", "value": "x"}]},
            "message 2 has role 'narrator', not one of system, user, assistant",
        ),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "message 1 is by 'tool': turns of tools are not trained",
        ),
        ({"messages": [USER]}, "the last message is by 'user', not 'assistant'"),
        ({"messages": [ANSWER]}, "message 1 is by 'assistant', expected 'user'"),
        ({"messages": [SYSTEM, ANSWER]}, "message 2 is by 'assistant', expected 'user'"),
        ({"messages": [USER, USER]}, "message 2 is by 'user', expected 'assistant'"),
        ({"messages": [USER, SYSTEM, ANSWER]}, "message 2 is by 'system', expected 'assistant'"),
        ({"messages": [SYSTEM]}, "the last message is by 'system', not 'assistant'"),
        (
            {"messages": [USER, {"role": "assistant", "content": "  "}]},
            "message 2 is an empty answer",
        ),
        (
            {"messages": [USER, {**ANSWER, "tool_calls": [1]}]},
            "message 2 has 'tool_calls', which training would leave out",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": None}]},
            "content of message 2 must be text, found null",
        ),
        (
            {"messages": [{"role": [], "content": "x"}]},
            "role of message 1 must be text, found a list",
        ),
    ],
)
def test_unusable_rows_have_a_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unusable) as caught:
        conversation(row, Columns())
    assert str(caught.value) == reason


def test_a_system_column_that_is_not_there_is_not_passed_over() -> None:
    with pytest.raises(Unusable, match="no 's', the column of the system message"):
        conversation({"prompt": "x", "response": "y"}, Columns(system="s"))


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
