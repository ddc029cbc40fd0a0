"""Objects that the pickle interpreter makes besides containers, numbers and text: all inert."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

MAX_NAME = 4096
"""Maximum number of characters of a key, a module name or a class name."""
_MAX_KEY_BITS = 60


class PickleError(ValueError):
    """The pickle is damaged, or uses an instruction that no state dict needs."""


@dataclass(frozen=True)
class Global:
    """Name of a class or function; the object itself is never looked up."""

    module: str
    name: str

    @cached_property  # a pickle may call one name millions of times
    def path(self) -> str:
        """Module and name, joined by a dot."""
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class Foreign:
    """Placeholder for an object of another class: the class, and the arguments of its call."""

    kind: str
    args: tuple[Any, ...] = ()
    state: Any = None


def named(module: Any, name: Any) -> Global:
    """Return the name of a class. Raises PickleError if it cannot be one."""
    if not (isinstance(module, str) and isinstance(name, str)):
        raise PickleError("a class without a name")
    if max(len(module), len(name)) > MAX_NAME:
        raise PickleError(f"a class's name of {max(len(module), len(name))} characters")
    return Global(module, name)


def key_of(key: Any) -> Any:
    """Return a key, or a placeholder equal to no other if hashing or comparing it could take long.

    Python hashes text with a secret seed, but integers without one: a pickle could contain millions
    of integers above 60 bits with the same hash, and a dictionary of them would take hours.
    """
    if isinstance(key, str | bytes):
        if len(key) > MAX_NAME:
            raise PickleError(f"a key of {len(key)} characters")
        return key
    if isinstance(key, int) and key.bit_length() > _MAX_KEY_BITS:
        return Foreign("key")
    return key if key is None or isinstance(key, int | float) else Foreign("key")
