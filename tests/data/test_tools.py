"""Tools, their calls and results, and reasoning: the forms in which users have them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tasks.data.kinds import CONVERSATIONS, LABELLED, PAIRS, PROMPTS, TEXTS, Kind, content_id
from tasks.data.messages import Columns, Unusable

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "Weather of a city.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": WEATHER}
ASKED = {"role": "user", "content": "Is it raining in Oslo?"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
RESULT = {"role": "tool", "content": '{"rain": true}'}
ANSWER = {"role": "assistant", "content": "Yes."}
READ = [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT, ANSWER]


def calling(**message: Any) -> list[Any]:
    """Return the conversation with this answer in place of the call."""
    return [ASKED, {"role": "assistant", **message}, RESULT, ANSWER]


OPENAI_CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
SHAREGPT = [
    {"from": "human", "value": ASKED["content"]},
    {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
    {"from": "observation", "value": RESULT["content"]},
    {"from": "gpt", "value": "Yes."},
]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": READ, "tools": [TOOL]},
        {"messages": calling(content=None, tool_calls=[OPENAI_CALL]), "tools": json.dumps([TOOL])},
        {"messages": calling(tool_calls=[CALL["function"]]), "tools": [WEATHER]},
        {
            "messages": calling(content="", function_call=OPENAI_CALL["function"]),
            "functions": [WEATHER],
        },
        {"conversations": SHAREGPT, "tools": json.dumps([WEATHER])},
    ],
    ids=["templates", "OpenAI", "TRL", "OpenAI before tools", "ShareGPT"],
)
def test_every_form_is_read_as_templates_take_it(row: dict[str, Any]) -> None:
    columns = Columns().among(row)
    assert CONVERSATIONS.read(row, columns) == {"messages": READ, "tools": [TOOL]}


def test_schemas_have_their_keys_in_the_order_of_a_request() -> None:
    """A server passes name, description, parameters to the template, however they were stored."""
    turned = dict(reversed(WEATHER.items()))
    row = CONVERSATIONS.read({"messages": READ, "tools": [turned]}, Columns())
    assert list(row["tools"][0]["function"]) == ["name", "description", "parameters"]


def test_parts_of_text_are_one_text_and_reasoning_stays() -> None:
    parts = [{"type": "text", "text": "Hello."}, {"type": "text", "text": "Who?"}]
    answer = {"role": "assistant", "content": "Me.", "reasoning_content": "They ask."}
    row = CONVERSATIONS.read({"messages": [{"role": "user", "content": parts}, answer]}, Columns())
    assert row["messages"] == [{"role": "user", "content": "Hello.\nWho?"}, answer]


def test_a_prompt_may_end_with_a_tools_result_and_a_call_is_no_reference_answer() -> None:
    row = PROMPTS.read({"messages": READ[:3], "tools": [TOOL], "n": 1}, Columns())
    assert (row["messages"], row["tools"], row["columns"]) == (READ[:3], [TOOL], {"n": 1})
    row = PROMPTS.read({"messages": READ[:2]}, Columns())
    assert row == {"messages": [ASKED], "columns": {}}


def test_rows_that_differ_in_tools_alone_are_no_duplicates() -> None:
    rows = [
        {"messages": READ},
        {"messages": READ, "tools": [TOOL]},
        {"messages": READ[:1] + READ[3:]},
    ]
    assert len({content_id(row) for row in rows}) == 3


def test_pairs_and_labelled_answers_keep_their_tools() -> None:
    row = {"prompt": READ[:3], "chosen": [ANSWER], "rejected": "No.", "tools": [WEATHER]}
    assert PAIRS.read(row, Columns())["tools"] == [TOOL]
    row = {"messages": READ, "label": True, "tools": [WEATHER]}
    assert LABELLED.read(row, Columns())["tools"] == [TOOL]


@pytest.mark.parametrize(
    "form", [json.dumps, lambda call: {**call, "arguments": json.dumps({"city": None})}]
)
def test_a_null_that_was_written_as_text_is_an_argument(form: Any) -> None:
    """Tables fill objects up with nulls, and no text."""
    call = form({"name": "weather", "arguments": {"city": None}})
    row = CONVERSATIONS.read({"messages": calling(tool_calls=call)}, Columns())
    (read,) = row["messages"][1]["tool_calls"]
    assert read["function"]["arguments"] == {"city": None}


@pytest.mark.parametrize("nothing", [None, [], "null", "[]"])
def test_an_answer_without_calls_has_none(nothing: object) -> None:
    turns = [{**ASKED, "tool_calls": nothing}, {**ANSWER, "tool_calls": nothing}]
    assert CONVERSATIONS.read({"messages": turns}, Columns())["messages"] == [ASKED, ANSWER]


def test_nulls_that_were_written_as_text_beside_the_parameters_are_kept() -> None:
    tools = json.dumps([{**WEATHER, "required": None}])
    row = CONVERSATIONS.read({"messages": READ, "tools": tools}, Columns())
    assert row["tools"][0]["function"]["required"] is None


def test_nulls_that_are_values_of_a_schema_are_kept() -> None:
    unit = {"enum": ["C", None], "default": None}
    tool = {**WEATHER, "parameters": {"type": "object", "properties": {"unit": unit}}}
    row = CONVERSATIONS.read({"messages": READ, "tools": [tool]}, Columns())
    assert row["tools"][0]["function"] == tool


TWICE = {"name": "weather", "arguments": json.dumps('{"city": "Oslo"}')}
NULLS = {**WEATHER, "parameters": {"type": "object", "properties": {"city": None}}}
ANY = {"anyOf": [{"type": "string", "enum": None}]}
FILLED = {"name": "weather", "arguments": {"city": "Oslo", "when": {"day": None}}}


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ({"messages": calling(tool_calls=[TWICE])}, "call 1 of message 2"),
        (
            {"messages": calling(tool_calls=[{"name": "f", "arguments": "{"}])},
            "call 1 of message 2",
        ),
        ({"messages": calling(tool_calls=[{"arguments": {}}])}, "call 1 of message 2"),
        ({"messages": READ, "tools": [TOOL, NULLS]}, "tool 2 of 'tools' has null for 'city'"),
        ({"messages": READ, "tools": [{**WEATHER, "strict": None}]}, "tool 1 .* 'strict'"),
        ({"messages": READ, "tools": [{**WEATHER, "parameters": ANY}]}, "tool 1 .* 'enum'"),
        ({"messages": calling(tool_calls=[FILLED])}, "call 1 of message 2 have null for 'day'"),
        ({"messages": READ, "tools": "[{"}, "'tools'"),
        ({"messages": [{**ASKED, "weight": 0}, ANSWER]}, "message 1 has 'weight'"),
        ({"messages": [READ[0], READ[1], READ[3]]}, "message 3 .* 'tool'"),
        ({"messages": [READ[0], READ[2], READ[3]]}, "message 2 .* 'assistant'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]},
            "message 1 .* 'image_url'",
        ),
    ],
)
def test_what_a_model_would_learn_wrongly_is_refused(row: dict[str, Any], place: str) -> None:
    with pytest.raises(Unusable, match=place):
        CONVERSATIONS.read(row, Columns())


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        (CONVERSATIONS, {"messages": [ASKED, ANSWER]}),
        (PAIRS, {"prompt": "<image>Which?", "chosen": "This.", "rejected": "That."}),
        (LABELLED, {"messages": [ASKED, ANSWER], "label": True}),
        (PROMPTS, {"prompt": "<image>Which?"}),
        (TEXTS, {"text": "<image>A cat."}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_rows_with_images_are_refused_and_empty_columns_are_not(
    kind: Kind, row: dict[str, Any]
) -> None:
    columns = Columns(text="text")
    assert kind.read({**row, "images": [], "video": None, "audio": ""}, columns)
    for media in ({"images": ["cat.png"]}, {"image": {"path": "a.png"}}, {"videos": ["a.mp4"]}):
        with pytest.raises(Unusable, match=repr(*media)):
            kind.read({**row, **media}, columns)
        assert kind.read({**row, **media}, columns, ignored=[*media])
