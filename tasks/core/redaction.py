"""Remove passwords from texts that are logged, shown or recorded."""

from __future__ import annotations

import re
from collections.abc import Iterable

_USER = re.compile(r"(?<=://)([^\s/?#'\"@:]*)(:?)[^\s/?#'\"]*@")
_QUERY = re.compile(
    r"([?&;](?:password|passwd|pwd|token|secret|api_?key|access_?key|signature)=)[^\s&;'\"]+",
    re.IGNORECASE,
)
_typed: dict[str, str] = {}
"""Overrides of this process's command line, by their redacted text."""


def redact(text: str) -> str:
    """Return a text in which no URL has a password; a user name alone counts as a token."""
    hidden = _USER.sub(lambda m: f"{m[1]}:***@" if m[2] else "***@", text)
    return _QUERY.sub(r"\1***", hidden)


def without_passwords(overrides: Iterable[str]) -> list[str]:
    """Redact overrides for Prefect, which records the parameters of a flow run.

    `with_passwords` restores them in this process.
    """
    shown = {redact(override): override for override in overrides}
    _typed.update(shown)
    return list(shown)


def with_passwords(overrides: Iterable[str]) -> list[str]:
    """Return the overrides that were typed, given those of `without_passwords`."""
    return [_typed.get(override, override) for override in overrides]
