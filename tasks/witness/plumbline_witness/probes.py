"""Choose the token sequences on which a model is measured.

Three kinds: a fixed public set of texts and conversations, the user's own prompts, and rows of the
training data. Rows are the best evidence of the training side's chat template, since they are the
ids that the model was trained on.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

LIMIT = 64
"""Tokens per probe; the rest is cut off."""

TEXTS = (
    "The quick brown fox jumps over the lazy dog. Then it sleeps until noon.",
    "def mean(values):\n    return sum(values) / len(values)\n\nprint(mean([1, 2, 3.5]))\n",
    "In 1969 Apollo 11 landed on the Moon; 12 + 30 = 42, and 7 * 8 = 56.",
    "Die Straße führt über die Brücke, und danach geht es bergauf bis zum Dorf.",
    '{"name": "probe", "values": [0.5, null, true], "nested": {"key": "value"}}',
    "人工智能正在改变世界。今天天气很好,我们去公园吧。",
)
"""Plain texts of the public set. They never change: witnesses of different runs are comparable."""

CHATS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("user", "What is the capital of France?"),),
    (("system", "You are a pirate."), ("user", "Say hello in one sentence.")),
    (("user", "Count to three."), ("assistant", "1, 2, 3."), ("user", "And now to five.")),
    (("user", "Write a Python function that reverses a string."),),
)
"""Conversations of the public set, as (role, content); rendered with the generation prompt."""

DATE = re.compile(r"strftime|datetime|\bnow\(")
"""Calls by which a chat template writes the date (Llama 3.2): another day has other tokens."""

SCHEMA = "Return the weather of a city."
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_FUNCTION = {"name": "get_weather", "description": SCHEMA, "parameters": _CITY}
TOOLS: tuple[dict[str, Any], ...] = ({"type": "function", "function": _FUNCTION},)
_CALL = {"name": "get_weather", "arguments": {"city": "Zürich"}}
CALLED: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "How warm is it in Zürich?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "weather01", "type": "function", "function": _CALL}],
    },
    {"role": "tool", "name": "get_weather", "tool_call_id": "weather01", "content": "18 <C>"},
)
"""Public conversation with a tool, a call and its result. It is rendered and not measured."""


@dataclass(frozen=True)
class Probe:
    """One token sequence."""

    ids: tuple[int, ...]  # at least two
    # "text", "chat", "prompt" (of the user), "row" (of the training data), or "dated": a chat that
    # the template renders with today's date, so that no later rendering is compared with it
    kind: str
    number: int  # position in `TEXTS`, `CHATS`, the user's prompts, or the data
    text: str | None = None  # what was tokenised; None for rows


def choose(tokenizer: Any, *, prompts: Sequence[str] = (), rows: Iterable[Any] = ()) -> list[Probe]:
    """Return the probes for a tokenizer; without a chat template there are no conversations."""
    probes = [
        Probe(_ids(tokenizer, text), kind, number, text)
        for kind, texts in (("text", TEXTS), ("prompt", prompts))
        for number, text in enumerate(texts)
    ]
    template = str(getattr(tokenizer, "chat_template", None) or "")
    kind = "dated" if DATE.search(template) else "chat"
    for number, chat in enumerate(CHATS if template else ()):
        messages = [{"role": role, "content": content} for role, content in chat]
        with contextlib.suppress(Exception):  # some templates refuse a system message
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            probes.append(Probe(_ids(tokenizer, text, special=False), kind, number, text))
    probes += [Probe(ids_of_row(row), "row", number) for number, row in enumerate(rows)]
    return [replace(probe, ids=probe.ids[:LIMIT]) for probe in probes if len(probe.ids) > 1]


def text_with_tools(tokenizer: Any) -> str | None:
    """Return `CALLED` as the chat template writes it; None if it drops tools or dates it."""
    with contextlib.suppress(Exception):
        text = str(
            tokenizer.apply_chat_template(
                [*CALLED], tools=[*TOOLS], tokenize=False, add_generation_prompt=True
            )
        )
        return text if SCHEMA in text and not DATE.search(str(tokenizer.chat_template)) else None
    return None


def _ids(tokenizer: Any, text: str, *, special: bool = True) -> tuple[int, ...]:
    return tuple(int(i) for i in tokenizer(text, add_special_tokens=special)["input_ids"])


def first_rows(dataset: Any, count: int) -> list[Any]:
    """Return the first examples of a dataset that can be indexed; none of any other dataset."""
    if dataset is None or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return []
    try:
        return [dataset[index] for index in range(min(count, len(dataset)))]
    except Exception:
        return []


def ids_of_row(row: Any) -> tuple[int, ...]:
    """Return the token ids of a training example; empty if it has none.

    Supervised examples have `input_ids`; pairs of TRL have a prompt and a chosen response.
    """
    if not isinstance(row, Mapping):
        return ()
    for names in _KEYS:
        if all(name in row for name in names):
            return tuple(token for name in names for token in _flat(row[name]))
    return ()


_KEYS = (
    ("input_ids",),
    ("prompt_ids", "chosen_ids"),
    ("prompt_input_ids", "chosen_input_ids"),
    ("chosen_input_ids",),
    ("input_ids_chosen",),
    ("chosen_ids",),
)


def _flat(values: Any) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    return [int(value) for value in values] if values and not isinstance(values[0], list) else []
