"""A pickle interpreter that cannot run code: it has no instruction that looks up or calls anything.

Pickle is a program for a stack machine (PEP 307, PEP 3154). Instructions that build containers,
numbers and strings do so here. Instructions that name a class push a `Global`, which is only the
name. Instructions that would call it ask `reduce`, a function of ours, for the object that (name,
arguments) stands for. So the worst that a hostile file can cause is an error: nothing recurses, no
size in the file is trusted before its bytes were read, and each instruction takes constant time and
about 100 bytes. Protocols 0 and 1 are not supported: torch writes protocol 2.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from tasks.weights.pickled.machine import Machine
from tasks.weights.pickled.objects import Foreign, Global, PickleError

MAX_STEPS = 20_000_000
"""Maximum number of instructions; the states of a model of 100,000 tensors have 10 million."""


def run(
    data: bytes,
    *,
    persistent: Callable[[Any], Any],
    reduce: Callable[[Global, tuple[Any, ...]], Any],
) -> Any:
    """Return the value that a pickle builds.

    Args:
        data: the pickle.
        persistent: returns the object for a persistent id.
        reduce: returns the object for a call of a `Global` with arguments.

    Raises:
        PickleError: the pickle is damaged, endless, or uses instructions that no state dict needs.
    """
    machine = Machine(data, persistent=persistent, reduce=reduce)
    try:
        for _ in range(MAX_STEPS):
            code = machine.next()
            if code == _STOP:
                return machine.result()
            handler = _HANDLERS.get(code)
            if handler is None:
                raise PickleError(f"instruction {code:#04x} at byte {machine.at - 1}")
            handler(machine)
    except (IndexError, KeyError, TypeError, struct.error, UnicodeDecodeError) as error:
        raise PickleError(f"damaged at byte {machine.at}: {error}") from error
    raise PickleError(f"more than {MAX_STEPS} instructions")


_STOP = ord(".")
_HANDLERS: Mapping[int, Callable[[Machine], None]] = {
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
