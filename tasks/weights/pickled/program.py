"""A pickle interpreter that cannot run code: it has no instruction that looks up or calls anything.

Pickle is a program for a stack machine (PEP 307, PEP 3154). Instructions that build containers,
numbers and strings do so here. Instructions that name a class push a `Global`, which is only the
name. Instructions that would call it ask `reduce`, a function of ours, for the object that (name,
arguments) stands for. So the worst that a hostile file can cause is an error: nothing recurses, no
size in the file is trusted before its bytes were read, and each instruction takes constant time and
about 100 bytes. All protocols are read; buffers out of band are not, since no file has them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from tasks.weights.pickled.machine import Machine
from tasks.weights.pickled.objects import (
    DamagedError,
    Foreign,
    Global,
    PickleError,
    UnresolvedError,
)

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
        PickleError: the pickle is damaged or endless, or has no single value.
    """
    machine = Machine(data, persistent=persistent, reduce=reduce)
    walk(machine)
    return machine.result()


def walk(machine: Machine, max_steps: int | None = None) -> None:
    """Interpret a pickle up to its end; what it did until then is in `machine` in any case.

    Raises:
        DamagedError: Python's unpickler would stop there, too.
        UnresolvedError: more than `max_steps` instructions (None is `MAX_STEPS`), or one whose
            effect cannot be told.
    """
    limit = MAX_STEPS if max_steps is None else max_steps
    try:
        while machine.steps < limit:
            code = machine.take(1)[0]
            machine.steps += 1
            if code == _STOP:
                return
            handler = _HANDLERS.get(code)
            if handler is None:
                raise DamagedError(f"instruction {code:#04x} at byte {machine.at - 1}")
            handler(machine)
    except PickleError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise DamagedError(f"damaged at byte {machine.at}: {error}") from error
    raise UnresolvedError(f"more than {limit} instructions")


_STOP = ord(".")
_HANDLERS: Mapping[int, Callable[[Machine], None]] = {
    ord("\x80"): Machine.protocol,
    ord("\x95"): Machine.frame,
    ord("("): Machine.mark,
    ord("0"): Machine.pop,
    ord("1"): Machine.pop_mark,
    ord("2"): Machine.duplicate,
    ord("I"): lambda m: m.push(m.number_line("I")),
    ord("L"): lambda m: m.push(m.number_line("L")),
    ord("F"): lambda m: m.push(m.number_line("F")),
    ord("N"): lambda m: m.push(None),
    ord("\x88"): lambda m: m.push(True),
    ord("\x89"): lambda m: m.push(False),
    ord("K"): lambda m: m.push(m.number("<B")),
    ord("M"): lambda m: m.push(m.number("<H")),
    ord("J"): lambda m: m.push(m.number("<i")),
    ord("G"): lambda m: m.push(m.number(">d")),
    ord("\x8a"): lambda m: m.push(m.long("<B")),
    ord("\x8b"): lambda m: m.push(m.long("<i")),
    ord("S"): lambda m: m.push(m.string("")),
    ord("T"): lambda m: m.push(m.string("<i")),
    ord("U"): lambda m: m.push(m.string("<B")),
    ord("V"): lambda m: m.push(m.text("")),
    ord("\x8c"): lambda m: m.push(m.text("<B")),
    ord("X"): lambda m: m.push(m.text("<I")),
    ord("\x8d"): lambda m: m.push(m.text("<Q")),
    ord("C"): lambda m: m.push(m.bytes_of("<B")),
    ord("B"): lambda m: m.push(m.bytes_of("<I")),
    ord("\x8e"): lambda m: m.push(m.bytes_of("<Q")),
    ord("\x96"): lambda m: m.push(m.bytes_of("<Q")),  # BYTEARRAY8
    ord(")"): lambda m: m.push(()),
    ord("]"): lambda m: m.push([]),
    ord("}"): lambda m: m.push({}),
    ord("\x8f"): lambda m: m.push(Foreign("builtins.set")),
    ord("\x91"): Machine.frozen_set,
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
    ord("p"): lambda m: m.store(""),
    ord("q"): lambda m: m.store("<B"),
    ord("r"): lambda m: m.store("<I"),
    ord("\x94"): lambda m: m.store(None),
    ord("g"): lambda m: m.fetch(""),
    ord("h"): lambda m: m.fetch("<B"),
    ord("j"): lambda m: m.fetch("<I"),
    ord("c"): Machine.name,
    ord("\x93"): Machine.stack_name,
    ord("\x82"): lambda m: m.extension("<B"),
    ord("\x83"): lambda m: m.extension("<H"),
    ord("\x84"): lambda m: m.extension("<i"),
    ord("i"): Machine.instance,
    ord("o"): Machine.object,
    ord("R"): Machine.call,
    ord("\x81"): Machine.call,  # NEWOBJ
    ord("\x92"): lambda m: m.call(keywords=True),  # NEWOBJ_EX
    ord("b"): Machine.build,
    ord("P"): lambda m: m.persistent(line=True),
    ord("Q"): Machine.persistent,
}
