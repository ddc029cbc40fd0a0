"""A row of the user's data -> a checked conversation.

Two shapes are read: a list of messages (`{"role", "content"}` each, or ShareGPT's `{"from",
"value"}`), or a prompt and a response in columns of their own. A system message may stand in a
column of its own. Texts pass through unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.data.columns import Columns
from tasks.data.messages import Message, Unusable, column_text, conversation_of


def conversation(values: Mapping[str, Any], columns: Columns) -> list[Message]:
    """The messages of a row; the last one is the assistant's.

    Raises:
        Unusable: a missing column, a wrong type, an empty answer, roles out of order.
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
    """The system message of a row that keeps it in a column; an empty list for none."""
    if columns.system is None:
        return []
    if columns.system not in values:
        raise Unusable(f"no {columns.system!r}, the column of the system message")
    if values[columns.system] in (None, ""):
        return []
    return [{"role": "system", "content": column_text(values, columns.system)}]
