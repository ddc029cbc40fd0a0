"""Read a row of the user's data as a preference pair, or as an answer with a label.

The answers of a pair are texts beside a prompt, messages beside a prompt (one message or a list),
or whole conversations that begin with the prompt (UltraFeedback, HH). In the last case the prompt
ends before the first message that differs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tasks.data.columns import Columns
from tasks.data.messages import (
    Message,
    Unusable,
    column_text,
    conversation,
    messages_of,
    require_turns,
    system_message,
    tools_of,
    transcript,
)
from tasks.data.readers import kind_of

_FLAGS = {"true": True, "false": False, "1": True, "0": False}


def preference(values: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    """Return `{"prompt", "chosen", "rejected", "margin"?}`: lists of messages, and a number.

    Raises:
        Unusable: a column is missing or has a wrong type, the answers are equal or empty, roles are
            out of order, or the margin is not a finite number.
    """
    missing = [name for name in (columns.chosen, columns.rejected) if name not in values]
    if missing:
        raise Unusable("no " + ", no ".join(repr(name) for name in missing))
    prompt = _prompt(values, columns)
    chosen = _answer(values, columns.chosen, prompt)
    rejected = _answer(values, columns.rejected, prompt)
    if chosen == rejected:
        raise Unusable(f"{columns.chosen!r} and {columns.rejected!r} are equal: nothing to prefer")
    if prompt is None:
        cut = _parting(chosen, rejected)
        prompt, chosen, rejected = chosen[:cut], chosen[cut:], rejected[cut:]
    if prompt and prompt[0]["role"] != "system":
        prompt = [*system_message(values, columns), *prompt]
    for name, turns in ((columns.chosen, chosen), (columns.rejected, rejected)):
        _require_answer(prompt, turns, name)
    row: dict[str, Any] = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    row |= tools_of(values)
    if columns.margin is not None:
        row["margin"] = _number(values, columns.margin)
    return row


def labelled(values: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    """Return `{"messages", "desirable"}`: a conversation, and the label of its last answer.

    Raises:
        Unusable: the conversation cannot be used, or the label is neither true nor false.
    """
    if columns.label not in values:
        raise Unusable(f"no {columns.label!r}, the column of the label")
    raw = values[columns.label]
    flag = _FLAGS.get(str(raw).lower()) if isinstance(raw, bool | int | str) else None
    if flag is None:
        shown = repr(raw) if isinstance(raw, str | int | float) else kind_of(raw)
        raise Unusable(f"{columns.label!r} must be true or false, found {shown[:40]}")
    return {"messages": conversation(values, columns), "desirable": flag, **tools_of(values)}


def _prompt(values: Mapping[str, Any], columns: Columns) -> list[Message] | None:
    """Return the messages before the answers; None if the answers contain the prompt."""
    if columns.prompt not in values:
        key = columns.messages or ""
        if isinstance(values[columns.chosen], Mapping) and key in values:
            return messages_of(values[key], key)  # ShareGPT's pairs
        return None
    raw = values[columns.prompt]
    if isinstance(raw, str):
        text = column_text(values, columns.prompt)
        return transcript(text) or [{"role": "user", "content": text}]
    return messages_of(raw, columns.prompt)


def _answer(values: Mapping[str, Any], key: str, prompt: list[Message] | None) -> list[Message]:
    """Return the messages after `prompt`; the whole conversation if the prompt is not known."""
    raw = values[key]
    if isinstance(raw, str):
        text = column_text(values, key)
        turns = transcript(text)
        if turns is None and prompt is None:
            raise Unusable(f"{key!r} is a text, and there is no prompt to go with it")
        messages = turns or [{"role": "assistant", "content": text}]
    else:
        messages = messages_of([raw] if isinstance(raw, Mapping) else raw, key)
    if prompt is None or messages[0]["role"] == "assistant":
        return messages
    # A conversation beside its prompt. A system message may stand in only one of the two.
    for start in (prompt, prompt[1:] if prompt[0]["role"] == "system" else prompt):
        if start and messages[: len(start)] == start:
            return messages[len(start) :]
    raise Unusable(f"{key!r} is a conversation that does not begin with the row's prompt")


def _parting(chosen: list[Message], rejected: list[Message]) -> int:
    """Return the number of common messages, after which both conversations have an answer."""
    same, shorter = 0, min(len(chosen), len(rejected))
    while same < shorter and chosen[same] == rejected[same]:
        same += 1
    if same == shorter:  # the shorter one ends here: split before its last answer
        same = shorter - 1
    if same < 1 or chosen[same]["role"] != "assistant" or rejected[same]["role"] != "assistant":
        at = f"message {same + 1}"
        raise Unusable(f"the two conversations differ first at {at}, which is not an answer")
    return same


def _require_answer(prompt: list[Message], turns: list[Message], key: str) -> None:
    if not turns:
        raise Unusable(f"{key!r} has no answer after the prompt")
    require_turns([*prompt, *turns])
    if turns[0]["role"] != "assistant" or turns[-1]["role"] != "assistant":
        raise Unusable(f"{key!r} must begin and end with an answer after the prompt")
    answers = [m for m in turns if m["role"] == "assistant"]
    if not all(m.get("tool_calls") or m["content"].strip() for m in answers):
        raise Unusable(f"{key!r} is empty: there is no answer to learn")


def _number(values: Mapping[str, Any], key: str) -> float:
    """Return the margin as a number; a CSV file has it as text."""
    if key not in values:
        raise Unusable(f"no {key!r}, the column of the margin")
    raw = values[key]
    try:
        number = float(raw) if isinstance(raw, int | float | str) else math.nan
    except ValueError:
        number = math.nan
    if isinstance(raw, bool) or not math.isfinite(number):
        shown = repr(raw)[:40] if isinstance(raw, str | float) else kind_of(raw)
        raise Unusable(f"{key!r} must be a finite number, found {shown}")
    return number
