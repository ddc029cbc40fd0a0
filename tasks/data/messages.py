"""Messages: what every kind of row is made of, checked.

A message is `{"role", "content"}`, or `{"from", "value"}` as in ShareGPT. Texts pass through
unchanged; an error names the number of the message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tasks.data.readers import kind_of

Message = dict[str, str]
ROLES = ("system", "user", "assistant")
SHAREGPT = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "model": "assistant", "assistant": "assistant", "system": "system",
}  # fmt: skip
"""Speakers of ShareGPT's `from`, and their roles."""
TOOLS = ("tool", "observation", "function", "function_call", "function_response", "tool_call")
"""Speakers of turns that are not trained: chat templates differ in how they write them."""
_SPEAKER = re.compile(r"\n\n(Human|Assistant):")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}


class Unusable(ValueError):
    """A row that cannot be learnt from; the text says why."""


def column_text(values: Mapping[str, Any], key: str) -> str:
    """The text of a column.

    Raises:
        Unusable: something else than text, or text that is not Unicode.
    """
    return sound(values[key], repr(key))


def sound(value: object, what: str) -> str:
    """The text itself, if it is one that can be written as UTF-8."""
    if not isinstance(value, str):
        raise Unusable(f"{what} must be text, found {kind_of(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Unusable(f"{what} has half of a surrogate pair at {error.start + 1}") from error
    return value


def conversation_of(raw: object, key: str) -> list[Message]:
    """A list of messages that ends with an answer, roles in order."""
    messages = messages_of(raw, key)
    require_turns(messages)
    if messages[-1]["role"] != "assistant":
        raise Unusable(f"the last message is by {messages[-1]['role']!r}, not 'assistant'")
    return messages


def messages_of(raw: object, key: str) -> list[Message]:
    """A list of well-formed messages, at least one; `key` is the column's name."""
    if not isinstance(raw, list):
        raise Unusable(f"{key!r} must be a list of messages, found {kind_of(raw)}")
    if not raw:
        raise Unusable(f"{key!r} is an empty list")
    return [_message(entry, number) for number, entry in enumerate(raw, start=1)]


def require_turns(messages: list[Message]) -> None:
    """User and assistant take turns, after a system message where there is one."""
    turns = messages[1:] if messages[0]["role"] == "system" else messages
    for number, turn in enumerate(turns):
        expected = ("user", "assistant")[number % 2]
        if turn["role"] != expected:
            place = number + 1 + len(messages) - len(turns)
            raise Unusable(f"message {place} is by {turn['role']!r} where {expected!r} is due")


def transcript(text: str) -> list[Message] | None:
    """The messages of a transcript in the manner of Anthropic's HH data; None for other text.

    Such a text is `\\n\\nHuman: ...\\n\\nAssistant: ...`; one space after a colon belongs to the
    mark.
    """
    parts = _SPEAKER.split(text)
    if len(parts) < 3 or parts[0].strip():
        return None
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return [{"role": _SPEAKERS[who], "content": said.removeprefix(" ")} for who, said in pairs]


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
