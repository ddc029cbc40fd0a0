"""Kinds of rows in a dataset artifact, and the objectives that train on them.

    conversations   {"id", "messages", "tools"?}
    texts           {"id", "text"}
    pairs           {"id", "prompt", "chosen", "rejected", "margin"?, "tools"?}
    labelled        {"id", "messages", "desirable", "tools"?}
    prompts         {"id", "messages", "answer"?, "columns", "tools"?}

Held-out pairs also have `messages`, the prompt with the chosen answer, to evaluate the served
model.
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
from tasks.data.messages import TOOLS, Message, Unusable, column_text, conversation, tools_of
from tasks.data.pairs import labelled, preference

Payload = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """One kind of rows.

    Attributes:
        name: name in `dataset.json`.
        read: turns a row of the user into a row of the artifact, without its id.
        either: sets of columns by role; a row needs all columns of one set.
        extras: optional columns by role.
        objectives: objectives that train on such rows.
    """

    name: str
    read: Callable[[Mapping[str, Any], Columns], Payload]
    either: tuple[tuple[str, ...], ...]
    extras: tuple[str, ...]
    objectives: tuple[str, ...]

    def fit(self, names: Collection[str], columns: Columns) -> bool:
        """Return True if a row with columns `names` has all columns of one set."""
        sets = ((roles, columns.named(roles)) for roles in self.either)
        return any(
            len(named) == len(roles) and set(named.values()) <= set(names) for roles, named in sets
        )

    def asked(self, columns: Columns) -> dict[str, str]:
        """Return the names of the required columns, by role; a row needs one set of them."""
        return columns.named(list(dict.fromkeys(role for roles in self.either for role in roles)))

    def used(self, columns: Columns) -> set[str]:
        """Return the names of all columns that are used."""
        return {*self.asked(columns).values(), *columns.named(self.extras).values(), *TOOLS}


def _messages(values: Mapping[str, Any], columns: Columns) -> Payload:
    return {"messages": conversation(values, columns), **tools_of(values)}


def document(values: Mapping[str, Any], columns: Columns) -> Payload:
    """Return `{"text"}`: a raw text, unchanged, as in pre-training. Training adds EOS.

    Raises:
        Unusable: the column is missing, is not text, or is blank.
    """
    if columns.text is None or columns.text not in values:
        raise Unusable(f"no {columns.text!r}, the column of the text")
    text = column_text(values, columns.text)
    if not text.strip():
        raise Unusable(f"{columns.text!r} is empty: there is nothing to learn")
    return {"text": text}


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
    """Return the kind of rows that an objective trains on.

    Args:
        objective: name of the objective.
        texts: True if the data are raw texts (`names_texts`); ignored for an objective that cannot
            train on them.

    Raises:
        KeyError: unknown objective.
    """
    if texts and objective in TEXTS.objectives:
        return TEXTS
    return {o: k for k in KINDS.values() if k is not TEXTS for o in k.objectives}[objective]


def names_texts(section: Mapping[str, Any]) -> bool:
    """Return True if section `data`, or one of its sources, names a column of raw texts."""
    sections = [section, *section.get("sources", ())]
    return any(source.get("text_key") is not None for source in sections)


def content_id(payload: Payload) -> str:
    """Return the id of a row: 16 hexadecimal digits, a hash of its contents."""
    parts = list(payload.values())
    if set(payload) == {"messages"}:
        return _digest(_texts(parts[0]))
    return _digest([_texts(part) if isinstance(part, list) else part for part in parts])


def side_id(payload: Payload) -> str:
    """Return the hash that decides whether a row is held out.

    All pairs, prompts and labelled answers with the same prompt have the same hash, so a model is
    never evaluated on a prompt that it was trained on. For conversations it is a hash of the whole
    text.
    """
    if "prompt" in payload:
        return _digest(_texts(payload["prompt"]))
    if "columns" in payload:
        return _digest(_texts([m for m in payload["messages"] if m["role"] != "assistant"]))
    if "desirable" in payload:
        return _digest(_texts(payload["messages"][:-1]))
    return content_id(payload)


def _texts(messages: list[Message]) -> list[Any]:
    """Return role and text of plain messages, and anything else as it is."""
    return [[m["role"], m["content"]] if set(m) == {"role", "content"} else m for m in messages]


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, ensure_ascii=True).encode()).hexdigest()[:16]
