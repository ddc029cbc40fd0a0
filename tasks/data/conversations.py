"""Read a row of the user's data as a conversation, and check it.

A row has a list of messages (`{"role", "content"}` each, or ShareGPT's `{"from", "value"}`), or a
prompt and a response in two columns. A system message may have its own column. Texts are not
changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.data.columns import Columns
from tasks.data.messages import Message, Unusable, column_text, conversation_of


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
