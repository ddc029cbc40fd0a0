"""A row of the user's data -> a checked conversation.

Two shapes are read: a list of messages (`{"role", "content"}` each), or a prompt and a response in
columns of their own, with an optional system column. Texts pass through unchanged.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.data.readers import kind_of
from tasks.errors import DataError

Message = dict[str, str]
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Columns:
    """Names of the columns that hold the conversation: messages, or prompt and response."""

    messages: str | None = "messages"
    prompt: str = "prompt"
    response: str = "response"
    system: str | None = None

    def fit(self, names: Collection[str]) -> bool:
        """Whether a row with these columns can be read."""
        return self.messages in names or (self.prompt in names and self.response in names)

    def used(self) -> set[str]:
        """Every column that is looked at."""
        names = (self.messages, self.prompt, self.response, self.system)
        return {name for name in names if name is not None}


class Unusable(ValueError):
    """A row that is no conversation; the text says why."""


def conversation(values: Mapping[str, Any], columns: Columns) -> list[Message]:
    """The messages of a row; the last one is the assistant's.

    Raises:
        Unusable: a missing column, a wrong type, an empty answer, roles out of order.
    """
    if columns.messages is not None and columns.messages in values:
        return _checked(values[columns.messages], columns.messages)
    if not columns.fit(values):
        raise Unusable(_missing(values, columns))
    messages = []
    if columns.system is not None:
        if columns.system not in values:
            raise Unusable(f"no {columns.system!r}, the column of the system message")
        if values[columns.system] not in (None, ""):
            messages.append({"role": "system", "content": _text(values, columns.system)})
    messages.append({"role": "user", "content": _text(values, columns.prompt)})
    messages.append({"role": "assistant", "content": _text(values, columns.response)})
    if not messages[-1]["content"].strip():
        raise Unusable(f"{columns.response!r} is empty: there is no answer to learn")
    return messages


def content_id(messages: list[Message]) -> str:
    """Identity of a conversation: 16 hexadecimal digits that depend on its texts only."""
    text = json.dumps([[m["role"], m["content"]] for m in messages], ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def wrong_columns(found: Collection[str], columns: Columns, source: str) -> DataError:
    """The error for a source none of whose rows has the columns asked for."""
    known = sorted(found)
    details = [f"columns found: {', '.join(known) or 'none'}"]
    hints = []
    asked = {"messages_key": columns.messages, "prompt_key": columns.prompt,
             "response_key": columns.response}  # fmt: skip
    for key, name in asked.items():
        if name is None:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        if near and name not in found:
            details.append(f"data.{key}={name} is not there; near it: {near[0]}")
            hints.append(f"data.{key}={near[0]}")
    either = f"no column {columns.messages!r}, nor" if columns.messages else "not"
    return DataError(
        f"{source}: {either} both {columns.prompt!r} and "
        f"{columns.response!r}; found {', '.join(map(repr, known)) or 'none'}",
        details=details,
        hint=" ".join(hints)
        or "data.messages_key=<column>, or data.prompt_key= data.response_key=",
    )


def _missing(values: Mapping[str, Any], columns: Columns) -> str:
    wanted = (columns.messages, columns.prompt, columns.response)
    missing = [name for name in wanted if name is not None and name not in values]
    return "no " + ", no ".join(repr(name) for name in missing)


def _text(values: Mapping[str, Any], key: str) -> str:
    return _sound(values[key], repr(key))


def _sound(value: object, what: str) -> str:
    """The text itself, if it is one that can be written as UTF-8."""
    if not isinstance(value, str):
        raise Unusable(f"{what} must be text, found {kind_of(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Unusable(f"{what} has half of a surrogate pair at {error.start + 1}") from error
    return value


def _checked(raw: object, key: str) -> list[Message]:
    if not isinstance(raw, list):
        raise Unusable(f"{key!r} must be a list of messages, found {kind_of(raw)}")
    if not raw:
        raise Unusable(f"{key!r} is an empty list")
    messages = [_message(entry, number) for number, entry in enumerate(raw, start=1)]
    turns = messages[1:] if messages[0]["role"] == "system" else messages
    for number, turn in enumerate(turns):
        expected = ("user", "assistant")[number % 2]
        if turn["role"] != expected:
            place = number + 1 + len(messages) - len(turns)
            raise Unusable(f"message {place} is by {turn['role']!r} where {expected!r} is due")
    if messages[-1]["role"] != "assistant":
        raise Unusable(f"the last message is by {messages[-1]['role']!r}, not 'assistant'")
    return messages


def _message(entry: object, number: int) -> Message:
    if not isinstance(entry, Mapping):
        raise Unusable(f"message {number} must be an object, found {kind_of(entry)}")
    for key in ("role", "content"):
        if key not in entry:
            raise Unusable(f"message {number} has no {key!r}")
    further = sorted(
        key for key, value in entry.items() if key not in ("role", "content") and value is not None
    )
    if further:
        raise Unusable(f"message {number} has {further[0]!r}, which training would leave out")
    role = _sound(entry["role"], f"role of message {number}")
    content = _sound(entry["content"], f"content of message {number}")
    if role not in ROLES:
        raise Unusable(f"message {number} has role {role!r}, not one of {', '.join(ROLES)}")
    if role == "assistant" and not content.strip():
        raise Unusable(f"message {number} is an empty answer")
    return {"role": role, "content": content}
