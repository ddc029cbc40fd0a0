"""Names of the columns of the user's data, by role."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tasks.core.errors import DataError

SHAREGPT_COLUMN = "conversations"


@dataclass(frozen=True)
class Columns:
    """Names of columns, as in `data.*_key`; None if there is no such column."""

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
        """Make columns from `{"messages_key": ..., ...}`.

        Raises:
            TypeError: an unknown key.
        """
        return cls(**{key.removesuffix("_key"): name for key, name in keys.items()})

    def among(self, names: Collection[str]) -> Columns:
        """Return the columns for a row with these names; ShareGPT's name for messages is known."""
        if self.messages == "messages" and "messages" not in names and SHAREGPT_COLUMN in names:
            return replace(self, messages=SHAREGPT_COLUMN)
        return self

    def named(self, roles: Collection[str]) -> dict[str, str]:
        """Return the names of the columns with these roles, such as `{"prompt": "question"}`."""
        return {role: name for role in roles if (name := getattr(self, role)) is not None}


def wrong_columns(present: Collection[str], wanted: Mapping[str, str], source: str) -> DataError:
    """Return the error for a source in which no row has the wanted columns."""
    known = sorted(present)
    near = {
        role: matches[0]
        for role, name in wanted.items()
        if (matches := difflib.get_close_matches(name, known, n=1, cutoff=0.5))
        and name not in present
    }
    names = " or ".join(repr(name) for name in wanted.values())
    return DataError(
        f"{source}: no row has the columns it needs ({names}); "
        f"found {', '.join(map(repr, known)) or 'none'}",
        hint=" ".join(f"data.{role}_key={near.get(role, '<column>')}" for role in near or wanted),
    )
