"""Columns of a row; read and check its messages, or the whole row as a conversation.

A message is `{"role", "content"}`, or `{"from", "value"}` as in ShareGPT. A conversation is a list
of messages, or a prompt and a response in two columns; a system message may have its own column.
Texts are not changed. An error names the number of the message.

Tools and reasoning are read in the forms of OpenAI, ShareGPT and TRL, and kept in the one that chat
templates take: the row's `tools` as `{"type", "function": {"name", "description", "parameters"}}`,
the `tool_calls` of an answer with arguments that are objects, their results as messages of role
`tool`, and `reasoning_content` or `thinking` as they are named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")
SHAREGPT = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "model": "assistant", "assistant": "assistant", "system": "system",
    "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
"""Roles by speaker, the value of ShareGPT's `from`."""
CALLS = ("function_call", "tool_call")
"""Speakers of ShareGPT whose text is a call of a tool, as JSON."""
TOOLS = ("tools", "functions")
"""Columns with the schemas of the row's tools."""
REASONING = ("reasoning_content", "thinking")
SYSTEM = ("system", "system_prompt")
"""Columns that have the system message of a row, in data sets that are often used."""
_OF_ROLE = {
    "assistant": ("tool_calls", "function_call", *REASONING),
    "tool": ("name", "tool_call_id"),
}
"""Keys of a message beside role and content."""
_VALUES = ("const", "default")
"""Keys of a schema with a value, which may be null."""
_FILLED = ", which tables write for keys that other rows have: store JSON text, without such keys"
_NOTHING: tuple[Any, ...] = (None, "", [], "null", "[]")
_SPEAKER = re.compile(r"\n\n(Human|Assistant):")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}


class Unusable(ValueError):
    """A row that cannot be used; the text is the reason."""


@dataclass(frozen=True)
class Columns:
    """Names of the columns of the user's data, as in `data.*_key`; None if there is no such column.

    ShareGPT calls its messages "conversations"; `among` knows that.
    """

    messages: str | None = "messages"
    prompt: str = "prompt"
    response: str = "response"
    system: str | None = None
    text: str | None = None
    chosen: str = "chosen"
    rejected: str = "rejected"
    label: str = "label"
    margin: str | None = None
    answer: str | None = "answer"

    def among(self, names: Collection[str]) -> Columns:
        """Return the columns for a row that has columns of these names."""
        if self.messages == "messages" and "messages" not in names and "conversations" in names:
            return replace(self, messages="conversations")
        return self


def kind_of(value: object) -> str:
    """Return the JSON type of a value, for messages."""
    names = {bool: "true or false", int: "a number", float: "a number", str: "text",
             list: "a list", dict: "an object", type(None): "null"}  # fmt: skip
    return names.get(type(value), type(value).__name__)


def tools_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `{"tools": schemas}` of a row that has tools, else {}."""
    for key in TOOLS:
        raw = values.get(key)
        text = isinstance(raw, str)
        if isinstance(raw, str) and raw.strip():
            raw = _from_json(raw, repr(key))
        if not raw:
            continue
        if not isinstance(raw, list):
            raise Unusable(f"{key!r} must be a list of schemas, found {kind_of(raw)}")
        return {
            "tools": [_tool(tool, f"tool {n} of {key!r}", text) for n, tool in enumerate(raw, 1)]
        }
    return {}


def _tool(raw: object, what: str, text: bool) -> dict[str, Any]:
    """Return a schema in OpenAI's form, its keys in the order in which servers pass them on.

    In JSON `text` null beside the parameters is the user's own; no schema of parameters has it.
    """
    function = _function(raw, what)
    if null := _null(function.get("parameters") if text else function):
        raise Unusable(f"{what} has null for {null!r}{': leave it out' if text else _FILLED}")
    first = {key: function[key] for key in ("name", "description", "parameters") if key in function}
    return {"type": "function", "function": {**first, **function}}


def _function(raw: object, what: str) -> Mapping[str, Any]:
    function = raw.get("function", raw) if isinstance(raw, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Unusable(f"{what} names no tool")
    return function


def _null(value: object, free: Collection[str] = _VALUES) -> str:
    """Return the first key with null at any depth, "" if none; keys in `free` may have anything."""
    if isinstance(value, list):
        return next(filter(None, (_null(item, free) for item in value)), "")
    for key, item in value.items() if isinstance(value, Mapping) else ():
        if key not in free and (null := str(key) if item is None else _null(item, free)):
            return null
    return ""


def _from_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise Unusable(f"{what} is no JSON: {error}") from error


def sound(value: object, what: str) -> str:
    """Return the text if it can be written as UTF-8. Raises Unusable, with the name `what`."""
    if not isinstance(value, str):
        raise Unusable(f"{what} must be text, found {kind_of(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Unusable(f"{what} has half of a surrogate pair at {error.start + 1}") from error
    return value


def filled(value: object, key: str) -> str:
    """Return the text of column `key`, which is not blank."""
    if not sound(value, repr(key)).strip():
        raise Unusable(f"{key!r} is empty: there is nothing to learn")
    return str(value)


def messages_of(raw: object, key: str) -> list[Message]:
    """Return a list of one or more checked messages; `key` is the name of the column."""
    if not isinstance(raw, list):
        raise Unusable(f"{key!r} must be a list of messages, found {kind_of(raw)}")
    if not raw:
        raise Unusable(f"{key!r} is an empty list")
    return [_message(entry, number) for number, entry in enumerate(raw, start=1)]


def require_turns(messages: list[Message]) -> None:
    """Raise Unusable unless user and assistant alternate, after an optional system message.

    Between an answer that calls tools and the next answer there are the results.
    """
    turns = messages[1:] if messages[0]["role"] == "system" else messages
    expected: tuple[str, ...] = ("user",)
    for number, turn in enumerate(turns):
        if turn["role"] not in expected:
            place = number + 1 + len(messages) - len(turns)
            wanted = " or ".join(map(repr, expected))
            raise Unusable(f"message {place} is by {turn['role']!r}, expected {wanted}")
        if turn["role"] == "assistant":
            expected = ("tool",) if turn.get("tool_calls") else ("user",)
        else:
            expected = ("tool", "assistant") if turn["role"] == "tool" else ("assistant",)


def transcript(raw: str) -> list[Message] | None:
    """Return the messages of a transcript in the format of Anthropic's HH data; None for others.

    The format is `\\n\\nHuman: ...\\n\\nAssistant: ...`. One space after the colon is not part of
    the message.
    """
    parts = _SPEAKER.split(raw)
    if len(parts) < 3 or parts[0].strip():
        return None
    turns = zip(parts[1::2], parts[2::2], strict=True)
    return [{"role": _SPEAKERS[who], "content": text.removeprefix(" ")} for who, text in turns]


def turns_of(
    values: Mapping[str, Any], columns: Columns, *, answered: bool
) -> tuple[list[Message], set[str]]:
    """Return the messages of a row, and the columns that they come from.

    `answered`: a prompt without a response is refused.
    """
    key = columns.messages
    if key is not None and key in values:
        messages, used = messages_of(values[key], key), {key}
    else:
        needed = (columns.prompt, columns.response) if answered else (columns.prompt,)
        if missing := [name for name in needed if name not in values]:
            raise Unusable("no " + ", no ".join(map(repr, filter(None, (key, *missing)))))
        raw, used = values[columns.prompt], {columns.prompt, columns.response}
        messages = messages_of(raw, columns.prompt) if isinstance(raw, list) else []
        messages = messages or [{"role": "user", "content": sound(raw, repr(columns.prompt))}]
        response = values.get(columns.response)
        if answered or has_text(response):
            text = filled(response, columns.response)
            messages.append({"role": "assistant", "content": text})
    require_turns(messages)
    if columns.system is not None and messages[0]["role"] != "system":
        used.add(columns.system)
        messages = [*system_message(values, columns), *messages]
    return messages, used


def has_text(value: object) -> bool:
    """Return True if a cell has an answer; a CSV file cannot leave a cell out."""
    return value is not None and not (isinstance(value, str) and not value.strip())


def conversation(values: Mapping[str, Any], columns: Columns) -> list[Message]:
    """Return the messages of a row; the last one is the assistant's."""
    messages, _ = turns_of(values, columns, answered=True)
    if messages[-1]["role"] != "assistant":
        raise Unusable(f"the last message is by {messages[-1]['role']!r}, not 'assistant'")
    return messages


def system_message(values: Mapping[str, Any], columns: Columns) -> list[Message]:
    """Return the system message from its own column, as a list; empty if there is none."""
    if columns.system is None or values.get(columns.system) in (None, ""):
        return []
    return [{"role": "system", "content": sound(values[columns.system], repr(columns.system))}]


def _message(entry: object, number: int) -> Message:
    if not isinstance(entry, Mapping):
        raise Unusable(f"message {number} must be an object, found {kind_of(entry)}")
    names = ("from", "value") if "role" not in entry and "from" in entry else ("role", "content")
    if names[0] not in entry:
        raise Unusable(f"message {number} has no {names[0]!r}")
    speaker = sound(entry[names[0]], f"{names[0]} of message {number}")
    role = "tool" if speaker == "function" else speaker
    if names[0] == "from":
        role = SHAREGPT.get(role.lower(), role)
    if role not in ROLES:
        raise Unusable(f"message {number} has role {speaker!r}, not one of {', '.join(ROLES)}")
    known = (*names, *_OF_ROLE.get(role, ()))
    further = sorted(key for key in entry if key not in known and entry[key] not in _NOTHING)
    if further:
        raise Unusable(f"message {number} has {further[0]!r}, which training would leave out")
    message: Message = {"role": role}
    raw = entry.get(names[1])
    if names[0] == "from" and speaker.lower() in CALLS:
        if not (calls := _calls(raw, number)):
            raise Unusable(f"message {number} has no call of a tool")
        return {"role": role, "content": "", "tool_calls": calls}
    calls = _calls(entry.get("tool_calls") or entry.get("function_call"), number)
    if raw is None and not calls:
        raise Unusable(f"message {number} has no {names[1]!r}")
    message["content"] = _content(raw, number)
    for key in (*REASONING, "name", "tool_call_id"):
        if entry.get(key):
            message[key] = sound(entry[key], f"{key} of message {number}")
    if calls:
        message["tool_calls"] = calls
    if role == "assistant" and not calls and not message["content"].strip():
        raise Unusable(f"message {number} is an empty answer")
    return message


def _content(raw: object, number: int) -> str:
    """Return the text of a message; parts of text are joined by newlines, as vLLM does."""
    if raw is None:
        return ""
    if not isinstance(raw, list):
        return sound(raw, f"content of message {number}")
    for part in raw:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else kind_of(part)
            raise Unusable(f"message {number} has a part of type {kind!r}: only text is trained")
    return "\n".join(sound(part.get("text"), f"a part of message {number}") for part in raw)


def _calls(raw: object, number: int) -> list[dict[str, Any]]:
    """Return calls of tools in OpenAI's form, except that arguments are objects, not JSON text."""
    text = isinstance(raw, str)
    calls = raw
    if isinstance(raw, str) and raw:
        calls = _from_json(raw, f"the calls of message {number}")
    if not calls:
        return []
    if isinstance(calls, Mapping):
        calls = [calls]
    if not isinstance(calls, list):
        raise Unusable(f"message {number}: calls of tools must be a list, found {kind_of(calls)}")
    return [
        _call(call, f"call {place} of message {number}", text)
        for place, call in enumerate(calls, 1)
    ]


def _call(raw: object, what: str, text: bool) -> dict[str, Any]:
    """Return a call; in its arguments null is a value only where JSON `text` has it."""
    function = _function(raw, what)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        text, arguments = True, _from_json(arguments, f"'arguments' in {what}")
        if isinstance(arguments, str):
            raise Unusable(f"'arguments' in {what} are JSON text in JSON text: encoded twice")
    if not isinstance(arguments, Mapping):
        raise Unusable(f"'arguments' in {what} must be an object, found {kind_of(arguments)}")
    if not text and (null := _null(arguments, ())):
        raise Unusable(f"'arguments' in {what} have null for {null!r}{_FILLED}")
    call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    identity = raw.get("id") if isinstance(raw, Mapping) else None
    return {"id": sound(identity, f"id of {what}"), **call} if identity else call
