"""Read and check the messages of a row, or the whole row as a conversation.

A message is `{"role", "content"}`, or `{"from", "value"}` as in ShareGPT. A conversation is a list
of messages, or a prompt and a response in two columns; a system message may have its own column.
Texts are not changed. An error names the number of the message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tasks.data.columns import Columns
from tasks.data.readers import kind_of

Message = dict[str, str]
ROLES = ("system", "user", "assistant")
SHAREGPT = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "model": "assistant", "assistant": "assistant", "system": "system",
}  # fmt: skip
"""Roles by speaker, the value of ShareGPT's `from`."""
TOOLS = ("tool", "observation", "function", "function_call", "function_response", "tool_call")
"""Speakers of turns that are not supported, because chat templates write them differently."""
_SPEAKER = re.compile(r"\n\n(Human|Assistant):")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}


class Unusable(ValueError):
    """A row that cannot be used; the text is the reason."""


def refuse_tools(values: Mapping[str, Any]) -> None:
    """Raise Unusable for a row with tools, which the chat template would not show to the model."""
    for name in ("tools", "functions"):
        if values.get(name):
            raise Unusable(f"it has {name!r}, which training would leave out")


def column_text(values: Mapping[str, Any], key: str) -> str:
    """Return the text of a column.

    Raises:
        Unusable: the value is not text, or cannot be written as UTF-8.
    """
    return sound(values[key], repr(key))


def sound(value: object, what: str) -> str:
    """Return the text if it can be written as UTF-8. Raises Unusable, with the name `what`."""
    if not isinstance(value, str):
        raise Unusable(f"{what} must be text, found {kind_of(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Unusable(f"{what} has half of a surrogate pair at {error.start + 1}") from error
    return value


def conversation_of(raw: object, key: str) -> list[Message]:
    """Return the messages of a conversation whose roles alternate and which ends with an answer."""
    messages = messages_of(raw, key)
    require_turns(messages)
    if messages[-1]["role"] != "assistant":
        raise Unusable(f"the last message is by {messages[-1]['role']!r}, not 'assistant'")
    return messages


def messages_of(raw: object, key: str) -> list[Message]:
    """Return a list of one or more checked messages; `key` is the name of the column."""
    if not isinstance(raw, list):
        raise Unusable(f"{key!r} must be a list of messages, found {kind_of(raw)}")
    if not raw:
        raise Unusable(f"{key!r} is an empty list")
    return [_message(entry, number) for number, entry in enumerate(raw, start=1)]


def require_turns(messages: list[Message]) -> None:
    """Raise Unusable unless user and assistant alternate, after an optional system message."""
    turns = messages[1:] if messages[0]["role"] == "system" else messages
    for number, turn in enumerate(turns):
        expected = ("user", "assistant")[number % 2]
        if turn["role"] != expected:
            place = number + 1 + len(messages) - len(turns)
            raise Unusable(f"message {place} is by {turn['role']!r}, expected {expected!r}")


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


def conversation(values: Mapping[str, Any], columns: Columns) -> list[Message]:
    """Return the messages of a row; the last one is the assistant's.

    Raises:
        Unusable: a column is missing or has a wrong type, an answer is empty, or roles are out of
            order.
    """
    if columns.messages is not None and columns.messages in values:
        messages = conversation_of(values[columns.messages], columns.messages)
        apart = [] if messages[0]["role"] == "system" else system_message(values, columns)
        return [*apart, *messages]
    wanted = (columns.messages, columns.prompt, columns.response)
    if columns.prompt not in values or columns.response not in values:
        missing = [name for name in wanted if name is not None and name not in values]
        raise Unusable("no " + ", no ".join(repr(name) for name in missing))
    messages = system_message(values, columns)
    messages.append({"role": "user", "content": column_text(values, columns.prompt)})
    messages.append({"role": "assistant", "content": column_text(values, columns.response)})
    if not messages[-1]["content"].strip():
        raise Unusable(f"{columns.response!r} is empty: there is no answer to learn")
    return messages


def system_message(values: Mapping[str, Any], columns: Columns) -> list[Message]:
    """Return the system message from its own column, as a list; empty if there is none."""
    if columns.system is None:
        return []
    if columns.system not in values:
        raise Unusable(f"no {columns.system!r}, the column of the system message")
    if values[columns.system] in (None, ""):
        return []
    return [{"role": "system", "content": column_text(values, columns.system)}]


def _message(entry: object, number: int) -> Message:
    if not isinstance(entry, Mapping):
        raise Unusable(f"message {number} must be an object, found {kind_of(entry)}")
    names = ("from", "value") if "role" not in entry and "from" in entry else ("role", "content")
    for key in names:
        if key not in entry:
            raise Unusable(f"message {number} has no {key!r}")
    further = sorted(key for key, value in entry.items() if key not in names and value is not None)
    if further:
        raise Unusable(f"message {number} has {further[0]!r}, which training would leave out")
    role = sound(entry[names[0]], f"{names[0]} of message {number}")
    content = sound(entry[names[1]], f"{names[1]} of message {number}")
    if names[0] == "from":
        role = SHAREGPT.get(role.lower(), role)
    if role.lower() in TOOLS:
        raise Unusable(f"message {number} is by {role!r}: turns of tools are not trained")
    if role not in ROLES:
        raise Unusable(f"message {number} has role {role!r}, not one of {', '.join(ROLES)}")
    if role == "assistant" and not content.strip():
        raise Unusable(f"message {number} is an empty answer")
    return {"role": role, "content": content}
