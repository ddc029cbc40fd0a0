"""Objects that the pickle interpreter makes besides containers, numbers and text: all inert."""

from __future__ import annotations

from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from dataclasses import dataclass
from functools import cached_property
from typing import Any

MAX_NAME = 4096
"""Maximum number of characters of a key, a module name or a class name."""
_MAX_KEY_BITS = 60


class PickleError(ValueError):
    """The pickle cannot be followed to its end."""


class DamagedError(PickleError):
    """Python's own unpickler stops at this instruction, too: nothing after it can run."""


class TruncatedError(DamagedError):
    """The data ends within the pickle.

    Attributes:
        end: offset up to which the next instruction reads, as far as that is known.
    """

    def __init__(self, message: str, end: int) -> None:
        super().__init__(message)
        self.end = end


class UnresolvedError(PickleError):
    """Python might go on, but this interpreter cannot tell with what."""


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
    """Return the name of a class, with Python 2's modules under their new names.

    Raises:
        UnresolvedError: the name is the result of a call, or too long.
        DamagedError: it cannot be a name.
    """
    if isinstance(module, Foreign) or isinstance(name, Foreign):
        raise UnresolvedError("a name that is built while the file is loaded")
    if not (isinstance(module, str) and isinstance(name, str)):
        raise DamagedError("a class without a name")
    if max(len(module), len(name)) > MAX_NAME:
        if not f"{module}.{name}".replace(".", "_").isidentifier():
            raise DamagedError("a long text where a class's name should be")
        raise UnresolvedError(f"a class's name of {max(len(module), len(name))} characters")
    module, name = NAME_MAPPING.get((module, name), (module, name))
    return Global(IMPORT_MAPPING.get(module, module), name)


def key_of(key: Any) -> Any:
    """Return a key, or a placeholder equal to no other if hashing or comparing it could take long.

    Python hashes text with a secret seed, but integers without one: a pickle could contain millions
    of integers above 60 bits with the same hash, and a dictionary of them would take hours.
    """
    if isinstance(key, str | bytes):
        if len(key) > MAX_NAME:
            raise UnresolvedError(f"a key of {len(key)} characters")
        return key
    if isinstance(key, int) and key.bit_length() > _MAX_KEY_BITS:
        return Foreign("key")
    plain = key is None or isinstance(key, int | float | Foreign)  # placeholders equal no other
    return key if plain else Foreign("key")
