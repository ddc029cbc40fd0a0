"""Read a row of the user's data as a prompt for online training.

The prompt is a list of messages that ends with the user's or a tool's, or a text in its own column.
An answer after the last message, or in the answer column, is the reference answer: rewards and
evaluation see it, the model does not. A call of tools is no reference answer. Null and blank text
count as no answer, because a CSV file cannot leave a cell out. All other columns are passed on to
rewards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tasks.data.columns import Columns
from tasks.data.messages import (
    TOOLS,
    Message,
    Unusable,
    column_text,
    messages_of,
    require_turns,
    sound,
    system_message,
    tools_of,
)
from tasks.data.readers import kind_of


def asked(values: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    """Return `{"messages", "answer"?, "columns", "tools"?}`; an answer is the last message, too.

    Raises:
        Unusable: a column is missing, has a wrong type or cannot be written as JSON, or roles are
            out of order.
    """
    messages, used = _prompt(values, columns)
    answer = None
    if messages[-1]["role"] == "assistant":
        last = messages.pop()
        answer = None if last.get("tool_calls") else last["content"]
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise Unusable("there is no user's message to answer")
    if columns.answer is not None and columns.answer in values:
        used.add(columns.answer)
        if _has_text(values[columns.answer]):
            answer = _as_text(values[columns.answer], columns.answer)
    row: dict[str, Any] = {"messages": messages}
    if answer is not None:
        row["messages"] = [*messages, {"role": "assistant", "content": answer}]
        row["answer"] = answer
    row |= tools_of(values)
    used.update(TOOLS)
    row["columns"] = {key: _plain(key, value) for key, value in values.items() if key not in used}
    return row


def _prompt(values: Mapping[str, Any], columns: Columns) -> tuple[list[Message], set[str]]:
    """Return the messages, and the columns that they come from."""
    if columns.messages is not None and columns.messages in values:
        messages = messages_of(values[columns.messages], columns.messages)
        require_turns(messages)
        return messages, {columns.messages}
    if columns.prompt not in values:
        either = f"no {columns.messages!r}, " if columns.messages is not None else ""
        raise Unusable(f"{either}no {columns.prompt!r}")
    raw, used = values[columns.prompt], {columns.prompt}
    if isinstance(raw, list):
        messages = messages_of(raw, columns.prompt)
    else:
        text = column_text(values, columns.prompt)
        messages = [*system_message(values, columns), {"role": "user", "content": text}]
        used |= {columns.system} if columns.system is not None else set()
    require_turns(messages)
    if columns.response in values:
        used.add(columns.response)
        if _has_text(values[columns.response]):
            answer = column_text(values, columns.response)
            messages = [*messages, {"role": "assistant", "content": answer}]
    return messages, used


def _has_text(value: object) -> bool:
    return value is not None and not (isinstance(value, str) and not value.strip())


def _as_text(value: object, key: str) -> str:
    """Return an answer as text; a number is a usual answer."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise Unusable(f"{key!r} must be text or a number, found {kind_of(value)}")
    return sound(value, repr(key)) if isinstance(value, str) else str(value)


def _plain(key: str, value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise Unusable(f"{key!r} cannot be passed on to a reward: {error}") from error
    return value
