"""The pickle interpreter alone: pickles that are damaged, endless, deep, or slow by design."""

from __future__ import annotations

import pickle
import struct
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.weights.pickled import program
from tasks.weights.pickled.objects import Foreign, Global, PickleError


def run(data: bytes) -> Any:
    return program.run(data, persistent=lambda _: None, reduce=lambda t, a: Foreign(t.path, a))


DAMAGED = [
    b"", b".", b"N", b"NN.", b"N..", b"(.", b"(N.", b"u.", b"}Nu.", b"}(Nu.", b"]s.", b"NR.",
    b"h\x00.", b"cposix\n", b"X\xff\xff\xff\xff", b"\x8e" + b"\xff" * 8, b"\x8b\x00\x00\x00\x7f",
    b"I\n.", b"Ix\n.", b"Sx\n.", b"\x80\x06N.", b"\x97.", b"X\x01\x00\x00\x00\xff.", b"\x93.",
    b"00",
    b"\x96" + b"\xff" * 8 + b".", b"r\xff\xff\xff\xff.", b"N\x87.", b"(N\x86.", b"Q.", b"b.",
    b"}X" + struct.pack("<I", 5000) + b"k" * 5000 + b"Ns.",
]  # fmt: skip


def test_damaged_pickles_are_errors() -> None:
    for data in DAMAGED:
        with pytest.raises(PickleError):
            run(data)
    with pytest.raises(PickleError) as raised:
        run(b"X" + struct.pack("<I", 100_000) + b"\xff" * 100_000 + b".")
    assert len(str(raised.value)) < 200


VALUES: list[tuple[bytes, Any]] = [
    (b"I1\n.", 1), (b"I01\n.", True), (b"L-7L\n.", -7), (b"F1.5\n.", 1.5), (b"S'a\\n'\n.", "a\n"),
    (b"Va\\u00fc\n.", "a\u00fc"), (b"T\x02\0\0\0ab.", "ab"), (b"U\x01a.", "a"),
    (b"(I1\n2l.", [1, 1]), (b"\x96\x01\0\0\0\0\0\0\0a.", b"a"), (b"Np3\n0g3\n.", None),
    (b"Np3\0x\n0g3\n.", None),
]  # fmt: skip


def test_instructions_that_torch_does_not_write() -> None:
    for data, value in VALUES:
        assert run(data) == value, data
    # C's unpickler reads `010` as 8 and stops at a zero byte, where `int` raises.
    for data in (b"I010\n.", b"I1\0x\n.", b"\x8a\xff" + b"\x01" * 255 + b"."):
        assert isinstance(run(data), Foreign)


def test_a_memo_index_costs_nothing() -> None:
    assert run(b"Nr\xff\xff\xff\xff.") is None


def test_depth_is_no_danger() -> None:
    depth = 200_000
    value = run(b"(" * depth + b"t" * depth + b".")
    for _ in range(depth - 1):
        (value,) = value
    assert value == ()
    deep_key = b"}" + b")" + b"\x85" * depth + b"Ns."  # its hash would overflow the C stack
    assert [type(key) for key in run(deep_key)] == [Foreign]


def test_endless_programs_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.weights.pickled.program.MAX_STEPS", 1000)
    with pytest.raises(PickleError, match="1000"):
        run(b"N0" * 1000 + b"N.")


def test_calls_become_placeholders() -> None:
    value = run(b"cos\nsystem\nX\x02\x00\x00\x00ls\x85R.")
    assert (value.kind, value.args) == ("os.system", ("ls",))
    assert run(b"cos\nsystem\n.") == Global("os", "system")


LARGEST = 2**60 - 1
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats(allow_nan=False)
    | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.tuples(inner, inner)
    | st.dictionaries(st.text(max_size=5) | st.integers(-LARGEST, LARGEST), inner, max_size=5),
    max_leaves=20,
)  # fmt: skip


@given(value=plain, protocol=st.sampled_from([3, 4, 5]))
@settings(max_examples=60, deadline=None)
def test_plain_values_survive(value: Any, protocol: int) -> None:
    assert run(pickle.dumps(value, protocol)) == value


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def test_keys_that_python_would_hash_alike_take_no_time() -> None:
    """Multiples of 2**61 - 1 all hash to 0: building a dictionary of them takes quadratic time."""
    keys = b"".join(
        b"\x8a\x0a" + (n * (2**61 - 1)).to_bytes(10, "little") + b"N" for n in range(1, 40_001)
    )
    started = time.process_time()
    value = run(b"}(" + keys + b"u.")
    assert time.process_time() - started < 3  # a minute with the integers themselves as keys
    assert {type(key) for key in value} == {Foreign}
    assert len(value) == 40_000


def test_calls_share_one_copy_of_a_long_name() -> None:
    """A call takes 4 bytes, its name 8,000 characters: copies of it would be a memory bomb."""
    name = b"c" + b"m" * 4000 + b"\n" + b"n" * 4000 + b"\nq\x000"
    value = run(b"]" + name + b"(" + b"h\x00)R" * 1000 + b"e.")
    assert len(value) == 1000
    assert len({id(foreign.kind) for foreign in value}) == 1


def test_names_without_end_are_refused() -> None:
    for module, name in (("m" * 5000, "n"), ("m", "n" * 5000)):
        with pytest.raises(PickleError, match="5000"):
            run(text(module) + text(name) + b"\x93.")


def test_sets_become_placeholders() -> None:
    assert [obj.kind for obj in run(pickle.dumps([{1, 2}, {3}], 4))] == ["builtins.set"] * 2
