"""Read settings from an untrusted JSON object, with their types checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

ALL_LINEAR = "all-linear"
"""peft's shorthand for all linear layers but the head; case does not matter."""

# Regular expressions that peft builds from names in a configuration; "{}" is the name.
PATTERN = r"(.*\.)?({})$"
SAVED = r"(^|.*\.){}($|\..*)"
LAYER = r"(?:^|.*?\.){}\.(\d+)\."

_HUGE = 1 << 31


def short(value: Any) -> str:
    """Return a value as text for a finding, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class ConfigReader:
    """Reads settings by key. A value of the wrong type adds a finding and reads as empty.

    Args:
        raw: the JSON object.
        findings: list to which findings are added.
    """

    def __init__(self, raw: Mapping[str, Any], findings: list[str]) -> None:
        self._raw, self._findings = raw, findings

    def _wrong(self, key: str, wanted: str) -> None:
        self._findings.append(f"{key}={short(self._raw.get(key))} is not {wanted}")

    def positive(self, key: str, kind: type[int] | type[float], default: int) -> Any:
        """Read a positive number; `default` if it is missing or wrong."""
        value = self._raw.get(key, default)
        if not _is_positive(value, kind):
            self._wrong(key, "a positive number")
            return default
        return value

    def flag(self, key: str) -> bool:
        """Read true or false; False if it is missing."""
        value = self._raw.get(key)
        if not isinstance(value, bool | None):
            self._wrong(key, "true or false")
        return value is True

    def names(self, key: str, within: str = "{}") -> tuple[str, ...]:
        """Read a list of names.

        Args:
            key: the setting.
            within: regular expression that each name will be inserted into, at "{}".
        """
        value = self._raw.get(key) or []
        if isinstance(value, str) and key == "layers_pattern":
            value = [value]
        if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
            self._wrong(key, "a list of names")
            return ()
        return tuple(name for name in value if within == "{}" or self._is_regex(key, name, within))

    def names_or_regex(self, key: str) -> tuple[str, ...] | str:
        """Read a list of names, a regular expression, or `ALL_LINEAR`."""
        value = self._raw.get(key)
        if not isinstance(value, str):
            return self.names(key)
        if value.lower() == ALL_LINEAR:
            return ALL_LINEAR
        return value if self._is_regex(key, value) else ()

    def integers(self, key: str) -> tuple[int, ...]:
        """Read a list of integers; a single integer counts as a list."""
        value = self._raw.get(key)
        value = [value] if type(value) is int else value or []
        if not isinstance(value, list) or not all(type(number) is int for number in value):
            self._wrong(key, "a list of layer numbers")
            return ()
        return tuple(value)

    def patterns(self, key: str, kind: type[int] | type[float]) -> dict[str, Any]:
        """Read positive numbers by pattern of module names."""
        value = self._raw.get(key) or {}
        if not isinstance(value, dict):
            self._wrong(key, "a mapping from names to numbers")
            return {}
        for name, number in value.items():
            if not _is_positive(number, kind):
                self._findings.append(f"{key}: {name}: {short(number)} is not a positive number")
        return {
            name: number
            for name, number in value.items()
            if _is_positive(number, kind) and self._is_regex(key, name, PATTERN)
        }

    def indices(self, key: str) -> dict[str, tuple[int, ...]]:
        """Read token ids by name of an embedding; a bare list is for the input embedding, ""."""
        value = self._raw.get(key) or {}
        value = {"": value} if isinstance(value, list) else value
        if not isinstance(value, dict) or not all(
            isinstance(rows, list) and all(type(row) is int and row >= 0 for row in rows)
            for rows in value.values()
        ):
            self._wrong(key, "a list of token ids, or such lists by name of an embedding")
            return {}
        for name, rows in value.items():
            if len(set(rows)) != len(rows):
                self._findings.append(f"{key}: {name or 'the embedding'}: duplicate token id")
        return {name: tuple(rows) for name, rows in value.items()}

    def _is_regex(self, key: str, text: str, within: str = "{}") -> bool:
        try:
            re.compile(within.replace("{}", text))
        except re.error as error:
            self._findings.append(f"{key}: {short(text)} is not a regular expression: {error}")
            return False
        return True


def _is_positive(value: Any, kind: type[int] | type[float]) -> bool:
    allowed = (int,) if kind is int else (int, float)
    return type(value) in allowed and 0 < value < _HUGE
