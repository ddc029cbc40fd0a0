"""Stack machine that interprets a pickle, without the instructions that could run code.

`program.py` maps instructions to methods.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NoReturn

from tasks.weights.pickled.objects import MAX_NAME, Foreign, Global, PickleError, key_of, named

_MAX_LONG = 64


class Machine:
    """Stack, marks and memo of one pickle, with one method per kind of instruction.

    Args:
        data: the pickle.
        persistent: returns the object for a persistent id.
        reduce: returns the object for a call of a `Global` with arguments; must not call it.
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

    @property
    def at(self) -> int:
        """Number of bytes of the pickle read so far."""
        return self._at

    def next(self) -> int:
        """Read the next instruction."""
        return self._take(1)[0]

    def result(self) -> Any:
        """Return the only value on the stack. Raises PickleError if there is not exactly one."""
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
        end = self._data.find(b"\n", self._at, self._at + MAX_NAME)
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
        """Push a number in a `struct` format."""
        self._stack.append(self._number(form))

    def push_long(self, form: str) -> None:
        """Push an integer of any size up to 64 bytes; its size is in a `struct` format."""
        size = self._number(form)
        if not 0 <= size <= _MAX_LONG:
            raise PickleError(f"an integer of {size} bytes")
        self._stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def push_text(self, form: str) -> None:
        """Push a string; its size is in a `struct` format."""
        self._stack.append(self._take(self._number(form)).decode())

    def push_bytes(self, form: str) -> None:
        """Push bytes; their size is in a `struct` format."""
        self._stack.append(self._take(self._number(form)))

    def push(self, value: Any) -> None:
        """Push a value."""
        self._stack.append(value)

    def mark(self) -> None:
        """Remember the height of the stack."""
        self._marks.append(len(self._stack))

    def pop(self) -> None:
        # As in pickle: the top of the stack may be a mark.
        """Drop the top of the stack, or the last mark."""
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._stack.pop()

    def pop_mark(self) -> None:
        """Drop everything above the last mark."""
        self._pop_mark()

    def tuple_of(self, count: int | None) -> None:
        """Replace the top `count` values, or those above the last mark, by a tuple."""
        if count is None:
            items = self._pop_mark()
        else:
            items = [self._pop() for _ in range(count)][::-1]
        self._stack.append(tuple(items))

    def list_of(self) -> None:
        """Replace the values above the last mark by a list."""
        self._stack.append(self._pop_mark())

    def dict_of(self) -> None:
        """Replace the keys and values above the last mark by a dictionary."""
        items = self._pop_mark()
        self._stack.append({})
        self._fill(items)

    def add(self, many: bool) -> None:
        """Append the top value, or `many` above the last mark, to the list below."""
        items = self._pop_mark() if many else [self._pop()]
        target = self._stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Foreign):  # contents of a foreign container are dropped
            self._refuse_target(target)

    def put(self, many: bool) -> None:
        """Put a key and its value, or `many` above the last mark, into the dictionary below."""
        self._fill(self._pop_mark() if many else [self._pop(), self._pop()][::-1])

    def _fill(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if len(items) % 2:
            raise PickleError(f"a key without a value at byte {self._at}")
        if isinstance(target, dict):
            for at in range(0, len(items), 2):
                target[key_of(items[at])] = items[at + 1]
        elif not isinstance(target, Foreign):
            self._refuse_target(target)

    def _refuse_target(self, target: Any) -> NoReturn:
        raise PickleError(f"fills a {type(target).__name__} at byte {self._at}")

    def store(self, form: str | None) -> None:
        """Store the top value in the memo: at an index in a `struct` format, or at the next one."""
        self._memo[len(self._memo) if form is None else self._number(form)] = self._stack[-1]

    def fetch(self, form: str) -> None:
        """Push a value from the memo; its index is in a `struct` format."""
        self._stack.append(self._memo[self._number(form)])

    def name(self) -> None:
        """Push the name of a class that follows as two lines."""
        self._stack.append(named(self._line(), self._line()))

    def stack_name(self) -> None:
        """Replace a module and a name on the stack by the name of a class."""
        name, module = self._pop(), self._pop()
        self._stack.append(named(module, name))

    def call(self, keywords: bool = False) -> None:
        """Replace a class and its arguments by the object of `reduce`; nothing is called."""
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
        """Give the state on top of the stack to the placeholder below; other objects ignore it."""
        state = self._pop()
        if isinstance(self._stack[-1], Foreign):
            self._stack[-1].state = state

    def persistent(self) -> None:
        """Replace a persistent id by the object that it stands for."""
        self._stack.append(self._persistent(self._pop()))

    def skip(self, count: int) -> None:
        """Skip bytes."""
        self._take(count)
