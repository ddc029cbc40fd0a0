"""Sections of the configuration: read from plain values, and turned into what Hydra checks against.

A section is one frozen dataclass. Its annotations are the types, its defaults the defaults, and the
comments behind its fields the help text. The ranks hold instances of it; `hydra_schema` derives
from it the mutable dataclass that Hydra needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from tasks.config.choices import TINY, Range
from tasks.config.defaults import COMPUTED
from tasks.core.errors import ConfigError
from tasks.core.finding import Finding

T = TypeVar("T")


@dataclass(frozen=True)
class Section:
    """Base of the sections that ranks read: their computed defaults have to be filled in."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            if getattr(self, setting.name) == COMPUTED:
                raise TypeError(f"{type(self).__name__} needs a value for {setting.name!r}")


def read_section(kind: type[T], values: Mapping[str, Any], name: str) -> T:
    """Return a section of the configuration as its dataclass.

    Args:
        kind: the dataclass; fields that are dataclasses are read likewise.
        values: by field; lists become tuples.

    Raises:
        ConfigError: the section has no such key.
    """
    refuse_unknown(kind, values, name)
    types = get_type_hints(kind)
    return kind(**{key: _read(types[key], value, f"{name}.{key}") for key, value in values.items()})


def _read(kind: Any, value: Any, name: str) -> Any:
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, Mapping):
        return read_section(kind, value, name)
    return tuple(value) if isinstance(value, list) else value


def refuse_unknown(kind: type[Any], values: Mapping[str, Any], section: str) -> None:
    """Raise ConfigError if a key is not a field of the dataclass."""
    known = {f.name for f in fields(kind)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(
            f"{section}.{unknown[0]} is not a setting of this section",
            details=[f"{section}.{name}" for name in unknown],
            hint=f"{section} knows: {', '.join(sorted(known))}",
        )


def out_of_range(
    kind: type[Any], values: Mapping[str, Any], section: str = ""
) -> Iterator[Finding]:
    """Yield the numbers outside the bounds that their fields have (`choices.Range`)."""
    types, bounds = get_type_hints(kind), _bounds(kind)
    for name, value in values.items():
        key = f"{section}.{name}" if section else name
        if is_dataclass(types[name]) and isinstance(value, Mapping):
            yield from out_of_range(types[name], value, key)
        elif name in bounds and value is not None:
            least, most = bounds[name]
            if not least <= value <= most:  # NaN too
                allowed = "more than 0" if least == TINY else f"at least {least:g}"
                allowed += f", at most {most:g}" if most < Range(0).most else ""
                example = f"{key}={min(max(least, 1), most):g}"
                yield Finding(key, f"{value:g}", allowed, example)


def _bounds(kind: type[Any]) -> dict[str, Range]:
    """Return the bounds of a section's numbers, by field."""
    return {
        name: mark
        for name, hint in get_type_hints(kind, include_extras=True).items()
        for part in (hint, *get_args(hint))  # of `Count | None`, too
        for mark in getattr(part, "__metadata__", ())
        if isinstance(mark, Range)
    }


@cache
def hydra_schema(section: type) -> type:
    """Return the dataclass that Hydra checks a section against.

    OmegaConf makes frozen dataclasses read-only and knows neither `Literal` nor tuples. So the
    result is mutable, words are an enumeration, tuples are lists, and a type that OmegaConf cannot
    check is Any. Its attribute `section` is the section that it was made from.
    """
    types = get_type_hints(section)
    members: list[Any] = []
    for setting in fields(section):
        kind = _hydra_type(types[setting.name])
        if is_dataclass(kind):
            default: Any = field(default_factory=kind)  # type: ignore[arg-type]
        elif setting.default == ():
            default = field(default_factory=list)
        elif setting.default is MISSING:
            default = field(default_factory=setting.default_factory)
        else:
            default = field(default=setting.default)
        members.append((setting.name, kind, default))
    made = make_dataclass(section.__name__, members, namespace={"section": section})
    made.__module__, made.__doc__ = section.__module__, section.__doc__
    return made


def _hydra_type(kind: Any) -> Any:
    arguments = get_args(kind)
    if is_dataclass(kind):
        return hydra_schema(kind)  # type: ignore[arg-type]
    if get_origin(kind) is Literal:
        return _enumeration(arguments)
    if get_origin(kind) in (list, tuple):
        return list[_hydra_type(arguments[0])]  # type: ignore[misc]
    if get_origin(kind) in (Union, UnionType):
        options = [_hydra_type(option) for option in arguments if option is not NoneType]
        return options[0] | None if _is_checked(options) else Any
    return kind


def _is_checked(options: list[Any]) -> bool:
    """Return True if the type beside None is one that OmegaConf checks."""
    checked = (bool, int, float, str, Enum)
    return len(options) == 1 and isinstance(options[0], type) and issubclass(options[0], checked)


@cache
def _enumeration(words: tuple[str, ...]) -> Any:
    return Enum("Words", {word: word for word in words})
