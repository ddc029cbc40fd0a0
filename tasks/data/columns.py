"""Which columns of the user's data hold what."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tasks.core.errors import DataError

SHAREGPT_COLUMN = "conversations"


@dataclass(frozen=True)
class Columns:
    """Names of columns, as in `data.*_key`; None: there is no such column."""

    messages: str | None = "messages"
    prompt: str = "prompt"
    response: str = "response"
    system: str | None = None
    text: str | None = None
    chosen: str = "chosen"
    rejected: str = "rejected"
    label: str = "label"
    margin: str | None = None
    answer: str | None = "answer"

    @classmethod
    def of(cls, keys: Mapping[str, Any]) -> Columns:
        """From `{"messages_key": ..., ...}`.

        Raises:
            TypeError: for a key that names no column of ours.
        """
        return cls(**{key.removesuffix("_key"): name for key, name in keys.items()})

    def among(self, names: Collection[str]) -> Columns:
        """Return these, with ShareGPT's column of messages where a row has no other."""
        if self.messages == "messages" and "messages" not in names and SHAREGPT_COLUMN in names:
            return replace(self, messages=SHAREGPT_COLUMN)
        return self

    def named(self, roles: Collection[str]) -> dict[str, str]:
        """The columns of these roles that have a name: `{"prompt": "question"}`."""
        return {role: name for role in roles if (name := getattr(self, role)) is not None}


def wrong_columns(found: Collection[str], asked: Mapping[str, str], source: str) -> DataError:
    """The error for a source none of whose rows has the columns asked for.

    Args:
        found: columns that there are.
        asked: columns looked for, by role.
        source: the file's name.
    """
    known = sorted(found)
    details = [f"columns found: {', '.join(known) or 'none'}"]
    hints = []
    for role, name in asked.items():
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        if near and name not in found:
            details.append(f"data.{role}_key={name} is not there; near it: {near[0]}")
            hints.append(f"data.{role}_key={near[0]}")
    if "messages" in asked:
        either = f"no column {asked['messages']!r}, nor both"
    else:
        either = "not both" if len(asked) == 2 else "not all of"
    columns = " and ".join(repr(name) for role, name in asked.items() if role != "messages")
    keys = [f"data.{role}_key=<column>" for role in asked if role != "messages"]
    if "messages" in asked:
        keys = ["data.messages_key=<column>, or", *keys]
    return DataError(
        f"{source}: {either} {columns}; found {', '.join(map(repr, known)) or 'none'}",
        details=details,
        hint=" ".join(hints or keys),
    )
