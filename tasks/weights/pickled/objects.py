"""What a pickle may make besides containers, numbers and text: names and inert objects."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

MAX_NAME = 4096
"""Characters of a key, of a module's name, of a class's."""
_MAX_KEY_BITS = 60


class PickleError(ValueError):
    """The pickle is damaged, or uses what no state dict needs."""


@dataclass(frozen=True)
class Global:
    """The name of a class or function: never the thing itself."""

    module: str
    name: str

    @cached_property  # once: a pickle may call one name millions of times
    def path(self) -> str:
        """Module and name, with a dot between them."""
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class Foreign:
    """An object of a class that is not ours to make: what it would have been made of."""

    kind: str
    args: tuple[Any, ...] = ()
    state: Any = None


def named(module: Any, name: Any) -> Global:
    """The name of a class. Raises PickleError for what can be none."""
    if not (isinstance(module, str) and isinstance(name, str)):
        raise PickleError("a class without a name")
    if max(len(module), len(name)) > MAX_NAME:
        raise PickleError(f"a class's name of {max(len(module), len(name))} characters")
    return Global(module, name)


def key_of(key: Any) -> Any:
    """A key as it is, or, where hashing or comparing it could take long, one equal to no other.

    Python hashes text with a secret, and integers without one: from 61 bits on a pickle could hold
    millions that all have the same hash, and a dictionary of them would take hours.
    """
    if isinstance(key, str | bytes):
        if len(key) > MAX_NAME:
            raise PickleError(f"a key of {len(key)} characters")
        return key
    if isinstance(key, int) and key.bit_length() > _MAX_KEY_BITS:
        return Foreign("key")
    return key if key is None or isinstance(key, int | float) else Foreign("key")
