"""Follow a pickle with the standard library's own Python unpickler, in which every name is inert.

Pickle is a program for a stack machine (PEP 307, PEP 3154). What names a class pushes a `Global`,
which is only the name; what would call it asks a method of ours for the object that (name,
arguments) stands for. So the worst that a hostile file can cause is an error: nothing is
looked up or called, no size in the file is trusted before its bytes were read, and each
instruction takes constant time. Where C's and Python's unpicklers differ, it follows the one that
goes on.
"""

from __future__ import annotations

import pickle
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from dataclasses import dataclass
from io import BytesIO
from typing import Any

MAX_STEPS = 20_000_000
"""Maximum number of instructions; the states of a model of 100,000 tensors have 10 million."""
_MAX_NAME = 4096
_MAX_KEY_BITS = 60
_STOPS = (LookupError, TypeError, ValueError)
_BYTES = frozenset(pickle.SHORT_BINBYTES + pickle.BINBYTES + pickle.BINBYTES8 + pickle.BYTEARRAY8)


class PickleError(ValueError):
    """The pickle cannot be followed to its end: it is damaged, unless a subclass says otherwise."""


class TruncatedError(PickleError):
    """The data ends within the pickle, before offset `end`."""

    def __init__(self, message: str, end: int) -> None:
        super().__init__(message)
        self.end = end


class UnresolvedError(PickleError):
    """Python might go on, but this interpreter cannot tell with what."""


@dataclass(frozen=True)
class Global:
    """Dotted name of a class or function; the object itself is never looked up."""

    path: str


@dataclass(eq=False, slots=True)
class Foreign:
    """Placeholder for an object of another class: the class, and the arguments of its call."""

    kind: str
    args: tuple[Any, ...] = ()
    state: Any = None


def _key(key: Any) -> Any:
    """Return a key, or a placeholder equal to no other if hashing or comparing it could take long.

    Python hashes text with a secret seed, but integers without one: a pickle could contain millions
    of integers above 60 bits with the same hash, and a dictionary of them would take hours.
    """
    plain = key is None or isinstance(key, str | bytes | int | float | Foreign)
    is_large = isinstance(key, int) and key.bit_length() > _MAX_KEY_BITS
    return key if plain and not is_large else Foreign("key")


_Unpickler: Any = pickle._Unpickler  # has no annotations of what a subclass needs


class Walker(_Unpickler):
    """The instructions of the pickle at an offset of `data`, without those that could run code.

    A subclass says what persistent ids and calls stand for. `names`, `calls`, `steps` and byte
    strings (`blobs`) are those so far, `at` is the offset of the next byte.
    """

    def __init__(self, data: bytes, at: int = 0) -> None:
        super().__init__(BytesIO())
        self.data, self.at = data, at
        self.names: set[str] = set()
        self.blobs: list[bytes] = []
        self.calls = self.steps = self.proto = self._frame_end = 0
        self.stack: list[Any] = []
        self.metastack: list[list[Any]] = []
        self.append = self.stack.append

    def walk(self, most: int) -> None:
        """Follow the pickle up to its end. Raises PickleError, also after `most` instructions."""
        try:
            while self.steps < most:
                code = self.read(1)[0]
                self.steps += 1
                if code == pickle.STOP[0]:
                    return
                self.dispatch[code](self)
                if code in _BYTES:
                    self.blobs.append(self.stack[-1])
        except PickleError:
            raise
        except (*_STOPS, struct.error, pickle.UnpicklingError) as error:
            raise PickleError(f"damaged at byte {self.at}: {error}") from error
        raise UnresolvedError(f"more than {most} instructions")

    def value(self) -> Any:
        """Return the object that the data, one pickle, builds. Raises PickleError."""
        self.walk(MAX_STEPS)
        if len(self.stack) != 1 or self.metastack or self.at != len(self.data):
            raise PickleError(f"ends at byte {self.at} of {len(self.data)} with a full stack")
        return self.stack[0]

    def persistent_load(self, _: Any) -> Any:
        return Foreign("a persistent id")

    def reduce(self, target: Global, args: tuple[Any, ...]) -> Any:
        """Return the object that a call stands for, without calling anything."""
        if target.path == "_codecs.encode" and args and isinstance(args[0], str):
            self.blobs.append(args[0].encode("latin-1", "ignore"))  # protocol 2 writes bytes so
        return Foreign(target.path, args)

    # Bytes and numbers

    def read(self, count: int) -> bytes:
        start, end = self.at, self.at + count
        if end > len(self.data):
            raise TruncatedError(f"cut short at byte {start}", end)
        if start < self._frame_end < end:  # there C's and Python's unpicklers read other bytes
            raise UnresolvedError(f"an instruction at byte {start} crosses the end of its frame")
        self.at = end
        return self.data[start:end]

    def readline(self) -> bytes:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise TruncatedError(f"a line without an end at byte {self.at}", len(self.data) + 1)
        return self.read(end + 1 - self.at)

    def load_frame(self) -> None:
        if self.at < self._frame_end:
            raise UnresolvedError(f"a frame within a frame at byte {self.at}")
        (size,) = struct.unpack("<Q", self.read(8))
        if size > len(self.data) - self.at:
            raise TruncatedError(f"a frame cut short at byte {self.at}", self.at + size)
        self._frame_end = self.at + size

    load_bytearray8 = _Unpickler.load_binbytes8  # its own allocates before it reads

    def _decode_string(self, value: bytes) -> Any:
        """Return a string of Python 2."""
        self.blobs.append(value)
        try:
            return value.decode()
        except UnicodeDecodeError:  # depends on the reader's `encoding`
            return Foreign("builtins.str")

    def load_int(self) -> None:
        """Skip a number in text, of which C's unpickler reads forms that `int` does not."""
        self.readline()
        self.append(Foreign("a number"))

    load_long = load_float = load_int

    def _line_number(self) -> int:
        return int(self.readline().split(b"\0")[0])  # C's unpickler ends at a zero byte

    def load_get(self) -> None:
        self.append(self.memo[self._line_number()])

    def load_put(self) -> None:
        self.memo[self._line_number()] = self.stack[-1]

    # Names and calls

    def find_class(self, module: Any, name: Any) -> Global:
        """Return the name of a class, with Python 2's modules under their new names."""
        if isinstance(module, Foreign) or isinstance(name, Foreign):
            raise UnresolvedError("a name that is built while the file is loaded")
        if not (isinstance(module, str) and isinstance(name, str)):
            raise PickleError("a class without a name")
        if max(len(module), len(name)) > _MAX_NAME:
            if not f"{module}.{name}".replace(".", "_").isidentifier():
                raise PickleError("a long text where a class's name should be")
            raise UnresolvedError(f"a class's name of {max(len(module), len(name))} characters")
        module, name = NAME_MAPPING.get((module, name), (module, name))
        target = Global(f"{IMPORT_MAPPING.get(module, module)}.{name}")
        self.names.add(target.path)
        return target

    def load_stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.append(self.find_class(module, name))

    def get_extension(self, code: int) -> None:
        self.append(self.find_class("copyreg", f"extension {code}"))

    def _instantiate(self, target: Any, args: Any) -> None:
        """Push what stands for the result of a call."""
        if not isinstance(target, Global | Foreign):
            raise PickleError(f"calls a {type(target).__name__} at byte {self.at}")
        self.calls += 1
        if isinstance(target, Global) and isinstance(args, tuple | list):
            self.append(self.reduce(target, tuple(args)))
        else:
            self.append(Foreign("a call of a call, or with other arguments"))

    def load_reduce(self) -> None:
        args, target = self.stack.pop(), self.stack.pop()
        self._instantiate(target, args)

    load_newobj = load_reduce

    def load_newobj_ex(self) -> None:
        self.stack.pop()  # named arguments
        self.load_reduce()

    # Containers: the library's own instructions write into any object, also into a `Tensor`.

    def load_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Global):
            raise UnresolvedError(f"changes {target.path} at byte {self.at}")
        if isinstance(target, Foreign):  # attributes of state dicts and tensors are left out
            self.calls += 1
            target.state = state

    def load_empty_set(self) -> None:
        self.append(Foreign("builtins.set"))

    def load_frozenset(self) -> None:
        self.append(Foreign("builtins.frozenset", tuple(self.pop_mark())))

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._fill(items)

    def load_append(self) -> None:
        self._extend([self.stack.pop()])

    def load_appends(self) -> None:
        self._extend(self.pop_mark())

    load_additems = load_appends

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._fill([key, value])

    def load_setitems(self) -> None:
        self._fill(self.pop_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        else:
            self._leave_out(target)

    def _fill(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, dict):
            pairs = zip(items[::2], items[1::2], strict=True)
            target.update((_key(key), value) for key, value in pairs)
        else:
            self._leave_out(target)

    def _leave_out(self, target: Any) -> None:
        """Leave out what goes into an object of another class."""
        if isinstance(target, Global | list):
            raise UnresolvedError(f"calls a method of a class or a list at byte {self.at}")
        if not isinstance(target, Foreign):
            raise PickleError(f"fills a {type(target).__name__} at byte {self.at}")


Walker.dispatch = {
    code: getattr(Walker, load.__name__) for code, load in _Unpickler.dispatch.items()
}
