"""Kinds of rows: what a dataset artifact holds, and which objective learns from it.

    conversations   {"id", "messages"}
    texts           {"id", "text"}
    pairs           {"id", "prompt", "chosen", "rejected", "margin"?}
    labelled        {"id", "messages", "desirable"}
    prompts         {"id", "messages", "answer"?, "columns"}

Held-out pairs also carry `messages`, the prompt with its chosen answer: the served model is tested
on them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.config.defaults import ONLINE
from tasks.data.asked import asked
from tasks.data.columns import Columns
from tasks.data.conversations import conversation
from tasks.data.messages import Message
from tasks.data.pairs import labelled, preference
from tasks.data.texts import document

Payload = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """One kind of rows.

    Attributes:
        name: as in `dataset.json`.
        read: the user's row -> the artifact's, without its id.
        either: sets of columns, by role; a row needs all of one set.
        extras: further columns that are looked at where they are named.
        objectives: which learn from such rows.
    """

    name: str
    read: Callable[[Mapping[str, Any], Columns], Payload]
    either: tuple[tuple[str, ...], ...]
    extras: tuple[str, ...]
    objectives: tuple[str, ...]

    def fit(self, names: Collection[str], columns: Columns) -> bool:
        """Whether a row with these columns can be read."""
        asked = (columns.named(roles) for roles in self.either)
        sets = zip(self.either, asked, strict=True)
        return any(len(a) == len(r) and set(a.values()) <= set(names) for r, a in sets)

    def asked(self, columns: Columns) -> dict[str, str]:
        """Columns that a row is looked at for, by role."""
        return columns.named(list(dict.fromkeys(role for roles in self.either for role in roles)))

    def used(self, columns: Columns) -> set[str]:
        """Every column that is looked at."""
        return {*self.asked(columns).values(), *columns.named(self.extras).values()}


def _messages(values: Mapping[str, Any], columns: Columns) -> Payload:
    return {"messages": conversation(values, columns)}


CONVERSATIONS = Kind(
    "conversations", _messages, (("messages",), ("prompt", "response")), ("system",), ("sft",)
)
TEXTS = Kind("texts", document, (("text",),), (), ("sft",))
PAIRS = Kind(
    "pairs",
    preference,
    (("chosen", "rejected"),),
    ("prompt", "messages", "system", "margin"),
    ("reward", "dpo", "orpo", "simpo"),
)
LABELLED = Kind(
    "labelled",
    labelled,
    (("messages", "label"), ("prompt", "response", "label")),
    ("system",),
    ("kto",),
)
PROMPTS = Kind(
    "prompts",
    asked,
    (("messages",), ("prompt",)),
    ("response", "system", "answer"),
    ONLINE,
)
KINDS = {kind.name: kind for kind in (CONVERSATIONS, PAIRS, LABELLED, TEXTS, PROMPTS)}


def kind_for(objective: str, *, texts: bool = False) -> Kind:
    """The rows that an objective learns from.

    Args:
        objective: its name.
        texts: whether the data are raw texts (`names_texts`); for an objective that cannot learn
            from them they play no part.

    Raises:
        KeyError: for an objective that is none.
    """
    if texts and objective in TEXTS.objectives:
        return TEXTS
    return {o: k for k in KINDS.values() if k is not TEXTS for o in k.objectives}[objective]


def names_texts(section: Mapping[str, Any]) -> bool:
    """Whether section `data` names a column of raw texts, for itself or for one of its sources."""
    several = [section, *section.get("sources", ())]
    return any(one.get("text_key") is not None for one in several)


def content_id(payload: Payload) -> str:
    """Identity of a row: 16 hexadecimal digits that depend on what it says only."""
    parts = list(payload.values())
    if set(payload) == {"messages"}:
        return _digest(_texts(parts[0]))
    return _digest([_texts(part) if isinstance(part, list) else part for part in parts])


def side_id(payload: Payload) -> str:
    """What decides on which side of the held-out line a row falls.

    Pairs and labelled answers of one prompt stay together: a model that was trained on one of them
    is not to be tested on another. For conversations it is the whole text.
    """
    if "prompt" in payload:
        return _digest(_texts(payload["prompt"]))
    if "columns" in payload:
        return _digest(_texts([m for m in payload["messages"] if m["role"] != "assistant"]))
    if "desirable" in payload:
        return _digest(_texts(payload["messages"][:-1]))
    return content_id(payload)


def _texts(messages: list[Message]) -> list[list[str]]:
    return [[m["role"], m["content"]] for m in messages]


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, ensure_ascii=True).encode()).hexdigest()[:16]
