"""Stack machine that interprets a pickle, without the instructions that could run code.

`program.py` maps instructions to methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tasks.weights.pickled.cursor import Cursor
from tasks.weights.pickled.objects import (
    DamagedError,
    Foreign,
    Global,
    PickleError,
    UnresolvedError,
    key_of,
    named,
)


def _placeholder(target: Global, args: tuple[Any, ...]) -> Foreign:
    return Foreign(target.path, args)


class Machine(Cursor):
    """Stack, marks and memo of one pickle, with one method per kind of instruction.

    Where C's and Python's unpicklers differ, it follows the one that goes on.

    Args:
        data: bytes that contain the pickle.
        at: offset of the pickle.
        persistent: returns the object for a persistent id.
        reduce: returns the object for a call of a `Global` with arguments; must not call it.

    Attributes:
        names: offset by name of each class or function that the pickle has named so far.
        calls: number of calls so far: of functions, of classes, and of `__setstate__`.
        steps: number of instructions so far.
    """

    def __init__(
        self,
        data: bytes,
        at: int = 0,
        *,
        persistent: Callable[[Any], Any] = lambda _: Foreign("a persistent id"),
        reduce: Callable[[Global, tuple[Any, ...]], Any] = _placeholder,
    ) -> None:
        super().__init__(data, at)
        self._persistent, self._reduce = persistent, reduce
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self.names: dict[Global, int] = {}
        self.calls = self.steps = 0

    @property
    def top(self) -> Any:
        """Value on top of the stack; None if there is none."""
        return self._stack[-1] if self._stack else None

    def result(self) -> Any:
        """Return the only value on the stack. Raises PickleError if there is not exactly one."""
        if len(self._stack) != 1 or self._marks or self.at != len(self.data):
            raise PickleError(f"ends at byte {self.at} of {len(self.data)} with a full stack")
        return self._stack[0]

    def _pop(self) -> Any:
        if self._marks and len(self._stack) <= self._marks[-1]:
            raise DamagedError(f"stack runs dry at byte {self.at}")
        return self._stack.pop()

    def _pop_mark(self) -> list[Any]:
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def push(self, value: Any) -> None:
        """Push a value."""
        self._stack.append(value)

    def duplicate(self) -> None:
        """Push the top of the stack once more."""
        self._stack.append(self._stack[-1])

    def mark(self) -> None:
        """Remember the height of the stack."""
        self._marks.append(len(self._stack))

    def pop(self) -> None:
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

    def frozen_set(self) -> None:
        """Replace the values above the last mark by a placeholder of a frozenset."""
        self._stack.append(Foreign("builtins.frozenset", tuple(self._pop_mark())))

    def add(self, many: bool) -> None:
        """Append the top value, or `many` above the last mark, to the list below."""
        items = self._pop_mark() if many else [self._pop()]
        target = self._stack[-1]
        if isinstance(target, list):
            target.extend(items)
        else:
            self._call_method(target, "append")

    def put(self, many: bool) -> None:
        """Put a key and its value, or `many` above the last mark, into the dictionary below."""
        self._fill(self._pop_mark() if many else [self._pop(), self._pop()][::-1])

    def _fill(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, list):
            raise UnresolvedError(f"replaces items of a list at byte {self.at}")
        if len(items) % 2 and not isinstance(target, Foreign | Global):
            raise DamagedError(f"a key without a value at byte {self.at}")
        if isinstance(target, dict):
            for at in range(0, len(items), 2):
                target[key_of(items[at])] = items[at + 1]
        else:
            self._call_method(target, "__setitem__")

    def _call_method(self, target: Any, name: str) -> None:
        """Note a call of a method; contents of a foreign container are dropped."""
        if isinstance(target, Global):
            raise UnresolvedError(f"calls {target.path}.{name} at byte {self.at}")
        if not isinstance(target, Foreign):
            raise DamagedError(f"fills a {type(target).__name__} at byte {self.at}")

    def store(self, form: str | None) -> None:
        """Store the top value in the memo: at an index in a `struct` format, or at the next one."""
        index = len(self._memo) if form is None else self.index(form)
        if index < 0:
            raise DamagedError(f"a negative index at byte {self.at}")
        self._memo[index] = self._stack[-1]

    def fetch(self, form: str) -> None:
        """Push a value from the memo; its index is in a `struct` format."""
        self._stack.append(self._memo[self.index(form)])

    def _named(self, module: Any, name: Any) -> Global:
        target = named(module, name)
        self.names.setdefault(target, self.at)
        return target

    def name(self) -> None:
        """Push the name of a class that follows as two lines."""
        self._stack.append(self._named(self.line().decode(), self.line().decode()))

    def stack_name(self) -> None:
        """Replace a module and a name on the stack by the name of a class."""
        name, module = self._pop(), self._pop()
        self._stack.append(self._named(module, name))

    def extension(self, form: str) -> None:
        """Push the name of a class that only the reader's `copyreg` knows, by its code."""
        self._stack.append(self._named("copyreg", f"extension {self.number(form)}"))

    def call(self, keywords: bool = False) -> None:
        """Replace a class and its arguments by the object of `reduce`; nothing is called."""
        if keywords:
            self._pop()
        args, target = self._pop(), self._pop()
        self._call(target, args)

    def instance(self) -> None:
        """Replace the arguments above the last mark by a call of the class named in two lines."""
        target = self._named(self.line().decode(), self.line().decode())
        self._call(target, tuple(self._pop_mark()))

    def object(self) -> None:
        """Replace a class and its arguments above the last mark by a call."""
        target, *args = self._pop_mark()
        self._call(target, tuple(args))

    def _call(self, target: Any, args: Any) -> None:
        if not isinstance(target, Global | Foreign):
            raise DamagedError(f"calls a {type(target).__name__} at byte {self.at}")
        self.calls += 1
        if isinstance(target, Global) and isinstance(args, tuple):
            self._stack.append(self._reduce(target, args))
        else:
            kind = "call with other arguments" if isinstance(target, Global) else "call of a call"
            self._stack.append(Foreign(kind))

    def build(self) -> None:
        """Give the state on top of the stack to the placeholder below; other objects ignore it."""
        state = self._pop()
        if isinstance(self._stack[-1], Global):
            raise UnresolvedError(f"changes {self._stack[-1].path} at byte {self.at}")
        if isinstance(self._stack[-1], Foreign):
            self.calls += 1
            self._stack[-1].state = state

    def persistent(self, line: bool = False) -> None:
        """Replace a persistent id, or one in a line of text, by the object that it stands for."""
        identity = self.line().decode() if line else self._pop()
        self._stack.append(self._persistent(identity))
