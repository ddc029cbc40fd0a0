"""A pickle interpreter that cannot run anything: it has no instruction to look up or call.

Pickle is a program for a stack machine (PEP 307, PEP 3154). Of its instructions, those that build
containers, numbers and strings do so here; those that name a class push a `Global`, which is only
the name; those that would call it ask `reduce`, a function of ours, what the pair (name, arguments)
stands for. So a hostile file can at worst be refused: time and memory are bounded by its size,
since nothing is walked recursively and no size that the file claims is believed before its bytes
were there. What protocols 0 and 1 do differently is not read: torch writes protocol 2.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

MAX_STEPS = 20_000_000
"""Instructions a pickle may have: the states of a model of 100,000 tensors have 10 million."""
_MAX_KEY = 4096
_MAX_LONG = 64


@dataclass(frozen=True)
class Global:
    """The name of a class or function: never the thing itself."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Foreign:
    """An object of a class that is not ours to make: what it would have been made of."""

    kind: str
    args: tuple[Any, ...] = ()
    state: Any = None


class PickleError(ValueError):
    """The pickle is damaged, or uses what no state dict needs."""


class Machine:
    """Interprets one pickle.

    Args:
        data: the pickle.
        persistent: what a persistent id stands for.
        reduce: what calling `Global` with arguments stands for.
    """

    def __init__(
        self,
        data: bytes,
        *,
        persistent: Callable[[Any], Any],
        reduce: Callable[[Global, tuple[Any, ...]], Any],
    ) -> None:
        self._data, self._at = data, 0
        self._persistent, self._reduce = persistent, reduce
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """The pickled value. Raises PickleError."""
        try:
            for _ in range(MAX_STEPS):
                code = self._take(1)[0]
                if code == _STOP:
                    return self._stop()
                handler = _HANDLERS.get(code)
                if handler is None:
                    raise PickleError(f"instruction {code:#04x} at byte {self._at - 1}")
                handler(self)
        except (IndexError, KeyError, TypeError, struct.error, UnicodeDecodeError) as error:
            raise PickleError(f"damaged at byte {self._at}: {error!r}") from error
        raise PickleError(f"more than {MAX_STEPS} instructions")

    def _stop(self) -> Any:
        if len(self._stack) != 1 or self._marks or self._at != len(self._data):
            raise PickleError(f"ends at byte {self._at} of {len(self._data)} with a full stack")
        return self._stack[0]

    def _take(self, count: int) -> bytes:
        piece = self._data[self._at : self._at + count]
        if len(piece) < count:
            raise PickleError(f"cut short at byte {self._at}")
        self._at += count
        return piece

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + _MAX_KEY)
        if end < 0:
            raise PickleError(f"a name without an end at byte {self._at}")
        return self._take(end + 1 - self._at)[:-1].decode()

    def _pop(self) -> Any:
        if self._marks and len(self._stack) <= self._marks[-1]:
            raise PickleError(f"stack runs dry at byte {self._at}")
        return self._stack.pop()

    def _pop_mark(self) -> list[Any]:
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def push_number(self, form: str) -> None:
        self._stack.append(self._number(form))

    def push_long(self, form: str) -> None:
        size = self._number(form)
        if not 0 <= size <= _MAX_LONG:
            raise PickleError(f"an integer of {size} bytes")
        self._stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def push_text(self, form: str) -> None:
        self._stack.append(self._take(self._number(form)).decode())

    def push_bytes(self, form: str) -> None:
        self._stack.append(self._take(self._number(form)))

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def pop(self) -> None:
        # As pickle has it: what is on top may be a mark.
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._stack.pop()

    def pop_mark(self) -> None:
        self._pop_mark()

    def tuple_of(self, count: int | None) -> None:
        if count is None:
            items = self._pop_mark()
        else:
            items = [self._pop() for _ in range(count)][::-1]
        self._stack.append(tuple(items))

    def list_of(self) -> None:
        self._stack.append(self._pop_mark())

    def dict_of(self) -> None:
        items = self._pop_mark()
        self._stack.append({})
        self._fill(items)

    def add(self, many: bool) -> None:
        items = self._pop_mark() if many else [self._pop()]
        target = self._stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Foreign):  # a foreign container's contents are nobody's
            self._refuse_target(target)

    def put(self, many: bool) -> None:
        self._fill(self._pop_mark() if many else [self._pop(), self._pop()][::-1])

    def _fill(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if len(items) % 2:
            raise PickleError(f"a key without a value at byte {self._at}")
        if isinstance(target, dict):
            for at in range(0, len(items), 2):
                target[_key(items[at])] = items[at + 1]
        elif not isinstance(target, Foreign):
            self._refuse_target(target)

    def _refuse_target(self, target: Any) -> NoReturn:
        raise PickleError(f"fills a {type(target).__name__} at byte {self._at}")

    def store(self, form: str | None) -> None:
        self._memo[len(self._memo) if form is None else self._number(form)] = self._stack[-1]

    def fetch(self, form: str) -> None:
        self._stack.append(self._memo[self._number(form)])

    def name(self) -> None:
        self._stack.append(Global(self._line(), self._line()))

    def stack_name(self) -> None:
        name, module = self._pop(), self._pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise PickleError(f"a class without a name at byte {self._at}")
        self._stack.append(Global(module, name))

    def call(self, keywords: bool = False) -> None:
        if keywords:
            self._pop()
        args, target = self._pop(), self._pop()
        if not isinstance(args, tuple):
            raise PickleError(f"arguments that are no tuple at byte {self._at}")
        if isinstance(target, Global):
            self._stack.append(self._reduce(target, args))
        else:
            self._stack.append(Foreign(f"call of a {type(target).__name__}"))

    def build(self) -> None:
        state = self._pop()
        if isinstance(self._stack[-1], Foreign):
            self._stack[-1].state = state

    def persistent(self) -> None:
        self._stack.append(self._persistent(self._pop()))

    def skip(self, count: int) -> None:
        self._take(count)


def _key(key: Any) -> Any:
    """A key as it is, or, where hashing or comparing it could take long, one equal to no other."""
    if isinstance(key, str | bytes):
        if len(key) > _MAX_KEY:
            raise PickleError(f"a key of {len(key)} characters")
        return key
    return key if key is None or isinstance(key, int | float) else Foreign("key")


_STOP = ord(".")
_HANDLERS: dict[int, Callable[[Machine], None]] = {
    ord("\x80"): lambda m: m.skip(1),  # PROTO
    ord("\x95"): lambda m: m.skip(8),  # FRAME
    ord("("): Machine.mark,
    ord("0"): Machine.pop,
    ord("1"): Machine.pop_mark,
    ord("N"): lambda m: m.push(None),
    ord("\x88"): lambda m: m.push(True),
    ord("\x89"): lambda m: m.push(False),
    ord("K"): lambda m: m.push_number("<B"),
    ord("M"): lambda m: m.push_number("<H"),
    ord("J"): lambda m: m.push_number("<i"),
    ord("G"): lambda m: m.push_number(">d"),
    ord("\x8a"): lambda m: m.push_long("<B"),
    ord("\x8b"): lambda m: m.push_long("<i"),
    ord("\x8c"): lambda m: m.push_text("<B"),
    ord("X"): lambda m: m.push_text("<I"),
    ord("\x8d"): lambda m: m.push_text("<Q"),
    ord("C"): lambda m: m.push_bytes("<B"),
    ord("B"): lambda m: m.push_bytes("<I"),
    ord("\x8e"): lambda m: m.push_bytes("<Q"),
    ord(")"): lambda m: m.push(()),
    ord("]"): lambda m: m.push([]),
    ord("}"): lambda m: m.push({}),
    ord("\x8f"): lambda m: m.push(Foreign("builtins.set")),
    ord("\x85"): lambda m: m.tuple_of(1),
    ord("\x86"): lambda m: m.tuple_of(2),
    ord("\x87"): lambda m: m.tuple_of(3),
    ord("t"): lambda m: m.tuple_of(None),
    ord("l"): Machine.list_of,
    ord("d"): Machine.dict_of,
    ord("a"): lambda m: m.add(many=False),
    ord("e"): lambda m: m.add(many=True),
    ord("\x90"): lambda m: m.add(many=True),  # ADDITEMS
    ord("s"): lambda m: m.put(many=False),
    ord("u"): lambda m: m.put(many=True),
    ord("q"): lambda m: m.store("<B"),
    ord("r"): lambda m: m.store("<I"),
    ord("\x94"): lambda m: m.store(None),
    ord("h"): lambda m: m.fetch("<B"),
    ord("j"): lambda m: m.fetch("<I"),
    ord("c"): Machine.name,
    ord("\x93"): Machine.stack_name,
    ord("R"): Machine.call,
    ord("\x81"): Machine.call,  # NEWOBJ
    ord("\x92"): lambda m: m.call(keywords=True),  # NEWOBJ_EX
    ord("b"): Machine.build,
    ord("Q"): Machine.persistent,
}
