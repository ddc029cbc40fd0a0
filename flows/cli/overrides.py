"""Overrides as they are given: of a whole run, or (`ppo:train.lr=1e-5`) of one of its links."""

from __future__ import annotations

import re
from collections.abc import Sequence

_FOR_LINK = re.compile(r"([a-z][a-z0-9_]*):([+~]{0,2}[\w./@]+(=.*)?)", re.DOTALL)


def split(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Overrides of the run, and those of single links by name."""
    plain, of_links = apart(overrides)
    found: dict[str, list[str]] = {}
    for override in of_links:
        name, _, own = override.partition(":")
        found.setdefault(name, []).append(own)
    return plain, found


def keys(overrides: Sequence[str]) -> list[str]:
    """Return what overrides set: dotted keys, and groups. Setting nothing (null, none) is none."""
    pairs = (override.lstrip("+~").partition("=") for override in overrides)
    return [key.partition("@")[0] for key, _, value in pairs if value not in ("null", "none")]


def apart(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Overrides of the run, and those of links as they were given."""
    of_links = [o for o in overrides if _FOR_LINK.fullmatch(o)]
    return [o for o in overrides if not _FOR_LINK.fullmatch(o)], of_links
