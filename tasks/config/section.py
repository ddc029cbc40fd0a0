"""Sections of the configuration: frozen dataclasses, of which the ranks hold instances.

The annotations are what pydantic checks (`flows/cli/composed.py`), the defaults are those of Hydra,
and the comments behind the fields are the help text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, TypeVar, get_type_hints

from tasks.core.errors import ConfigError

T = TypeVar("T")


class Section:
    """Base of all sections. Unknown keys are refused, and a number is a text where text is due."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid", "coerce_numbers_to_str": True}


def read_section(kind: type[T], values: Mapping[str, Any], name: str) -> T:
    """Return a section of the configuration as its dataclass; lists become tuples.

    Fields that are dataclasses are read likewise. Raises ConfigError for an unknown key.
    """
    types = get_type_hints(kind)
    if unknown := sorted(set(values) - {f.name for f in fields(kind)}):  # type: ignore[arg-type]
        raise ConfigError(f"{name}.{unknown[0]} is not a setting of this section")
    return kind(**{key: _read(types[key], value, f"{name}.{key}") for key, value in values.items()})


def _read(kind: Any, value: Any, name: str) -> Any:
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, Mapping):
        return read_section(kind, value, name)
    return tuple(value) if isinstance(value, list) else value
