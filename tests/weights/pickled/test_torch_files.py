"""Files of `torch.save` read without torch: compared with torch; damaged, hostile, endless."""

from __future__ import annotations

import os
import pickle
import struct
import time
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.core.errors import ArtifactError
from tasks.weights.files.reader import torch_dtype
from tasks.weights.pickled import program
from tasks.weights.pickled.archive import read_archive
from tasks.weights.pickled.objects import Foreign, Global, PickleError
from tasks.weights.pickled.state import read_state
from tasks.weights.pickled.tensors import TensorRef, TorchFile, read_torch_file
from tests.weights.pickled.making import zipped

GOOD: dict[str, Any] = {
    "weight": torch.randn(5, 3, generator=torch.Generator().manual_seed(1)),
    "half": torch.arange(7).to(torch.bfloat16),
    "parameter": torch.nn.Parameter(torch.ones(2, 2)),
    "part": torch.arange(50.0)[10:20],
    "count": torch.tensor(3),
    "flags": torch.tensor([True, False]),
    "small": torch.zeros(4).to(torch.float8_e4m3fn),
    "wide": torch.tensor([1, 2], dtype=torch.uint16),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "good.pt"
    torch.save({**GOOD, "nested": {"size": torch.Size([2, 3]), "list": [1, 2.5, "x", None]}}, path)
    return path.read_bytes()


def loaded(file: TorchFile, ref: TensorRef) -> torch.Tensor:
    extent = file.extent(ref)
    raw = extent.path.read_bytes()[extent.start : extent.start + extent.nbytes]
    dtype = torch.uint16 if ref.dtype == "U16" else torch_dtype(ref.dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(ref.shape)


@pytest.mark.parametrize("protocol", [2, 5])
def test_tensors_equal_torchs(tmp_path: Path, protocol: int) -> None:
    torch.save(GOOD, tmp_path / "x.pt", pickle_protocol=protocol)
    file = read_torch_file(tmp_path / "x.pt")
    assert list(file.content) == list(GOOD)
    for name, want in GOOD.items():
        have = loaded(file, file.content[name])
        assert (have.dtype, have.shape) == (want.dtype, want.shape)
        both = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (have, want))
        assert torch.equal(*both), name


def test_files_beyond_4_gb(tmp_path: Path) -> None:
    count = (5 << 30) // 4
    path = tmp_path / "x.pt"
    with torch.serialization.skip_data():  # sparse: only the table is written and read
        torch.save({"a": torch.empty(count), "b": torch.ones(3)}, path)
    file = read_torch_file(path)
    assert file.content["a"].shape == (count,)
    assert file.extent(file.content["a"]).nbytes == 5 << 30
    assert file.extent(file.content["b"]).start > 5 << 30


class Attack:
    """Object that touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_code_is_never_run(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    torch.save({"weight": torch.ones(2), "evil": Attack(touched)}, tmp_path / "x.bin")
    content = read_torch_file(tmp_path / "x.bin").content
    assert content["evil"].kind == "posix.system"
    assert isinstance(content["weight"], TensorRef)
    with pytest.raises(ArtifactError, match="'evil'"):
        read_state(tmp_path / "x.bin")
    assert not touched.exists()
    torch.load(tmp_path / "x.bin", weights_only=False)  # the attack is real
    assert touched.exists()


def test_other_objects_than_state_dicts_are_refused(tmp_path: Path) -> None:
    # torch saves such a view as its storage and a flag; without the flag signs are wrong.
    negated = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert negated.is_neg()
    for state, thing in (
        ({"weight": negated}, "weight"),
        ({"a": torch.empty(0)}, "a: "),
        ({"a": torch.ones(3, 2).t()}, "a: "),
        ({"a": 3}, "'a'"),
        ({}, "empty"),
        ([torch.ones(2)], "list"),
    ):
        torch.save(state, tmp_path / "x.bin")
        with pytest.raises(ArtifactError, match=thing):
            read_state(tmp_path / "x.bin")
    torch.save(GOOD["weight"], tmp_path / "x.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(ArtifactError, match=r"1\.6"):
        read_state(tmp_path / "x.bin")


def test_other_files_and_records_are_refused(tmp_path, monkeypatch) -> None:
    path = tmp_path / "x.pt"
    many = {f"{number:03d}/x{number}": b"" for number in range(500)}
    for content, thing in (
        (b"", ""),
        (b"PK\x03\x04", ""),
        (b"{}", ""),
        (zipped({"x/data.pkl": b"N." * 50}, zipfile.ZIP_DEFLATED), "compressed"),
        (zipped({"x/data.pkl": b"N.", "x/byteorder": b"big"}), "big-endian"),
        (zipped({"x/data.pkl": b"N.", "x/" + "n" * 2000: b""}), "2002"),
        (zipped(many), "000, 001, 002"),
    ):
        path.write_bytes(content)
        with pytest.raises(ArtifactError, match=thing or None) as raised:
            read_torch_file(path)
        assert len(raised.value.message) < 300
    path.write_bytes(zipped({"x/data.pkl": b"N." * 50}))
    for limit in ("tensors.MAX_PICKLE_BYTES", "directory.MAX_DIRECTORY"):
        with monkeypatch.context() as patch:
            patch.setattr(f"tasks.weights.pickled.{limit}", 10)
            with pytest.raises(ArtifactError, match=r"x\.pt"):
                read_torch_file(path)


def view(path: Path) -> Any:
    """Return a file's contents and the byte ranges of its tensors."""
    file = read_torch_file(path)
    refs = {n: file.extent(v) for n, v in file.content.items() if isinstance(v, TensorRef)}
    return repr(file.content), refs


FLIPS = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=4
)


@given(flips=FLIPS, length=st.floats(0, 1, exclude_max=True))
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_flipped_byte_is_an_error_or_changes_nothing(good, tmp_path, flips, length) -> None:
    """A file that is cut is always an error."""
    raw = bytearray(good)
    for at, mask in flips:
        raw[int(at * len(raw))] ^= mask
    path = tmp_path / "good.pt"
    path.write_bytes(good[: int(length * len(good))])
    with pytest.raises(ArtifactError):
        read_torch_file(path)
    path.write_bytes(good)
    before = view(path)
    path.write_bytes(raw)
    try:
        after = view(path)
    except ArtifactError:
        return
    assert after == before


@given(flips=FLIPS)
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_hostile_pickle_ends_in_a_value_or_an_error(good, tmp_path, flips) -> None:
    """The checksum is corrected, so that the pickle interpreter itself is tested."""
    path = tmp_path / "x.pt"
    path.write_bytes(good)
    record = read_archive(path).records["data.pkl"]
    raw = bytearray(good)
    for at, mask in flips:
        raw[record.start + int(at * record.nbytes)] ^= mask
    data = bytes(raw[record.start : record.start + record.nbytes])
    directory = raw.index(b"PK\x01\x02")
    raw[directory + 16 : directory + 20] = struct.pack("<I", zlib.crc32(data))
    path.write_bytes(raw)
    try:
        file = read_torch_file(path)
    except ArtifactError:
        return
    if isinstance(file.content, dict):
        for value in file.content.values():
            if isinstance(value, TensorRef) and value.contiguous:
                extent = file.extent(value)
                assert extent.start + extent.nbytes <= len(raw)


def run(data: bytes) -> Any:
    """Run a pickle's instructions alone."""
    return program.run(data, persistent=lambda _: None, reduce=lambda t, a: Foreign(t.path, a))


DAMAGED = [
    b"", b".", b"N", b"NN.", b"N..", b"(.", b"(N.", b"u.", b"}Nu.", b"}(Nu.", b"]s.", b"NR.",
    b"h\x00.", b"cposix\n", b"X\xff\xff\xff\xff", b"\x8e" + b"\xff" * 8, b"\x8b\x00\x00\x00\x7f",
    b"I\n.", b"Ix\n.", b"Sx\n.", b"\x80\x06N.", b"\x97.", b"X\x01\x00\x00\x00\xff.", b"\x93.",
    b"00",
    b"\x96" + b"\xff" * 8 + b".", b"r\xff\xff\xff\xff.", b"N\x87.", b"(N\x86.", b"Q.", b"b.",
    b"}X" + struct.pack("<I", 5000) + b"k" * 5000 + b"Ns.",
    b"X" + struct.pack("<I", 100_000) + b"\xff" * 100_000 + b".",
    *(
        b"X" + struct.pack("<I", len(module)) + module + b"X" + struct.pack("<I", len(name))
        + name + b"\x93."
        for module, name in ((b"m" * 5000, b"n"), (b"m", b"n" * 5000))
    ),
]  # fmt: skip
VALUES: list[tuple[bytes, Any]] = [
    (b"I1\n.", 1), (b"I01\n.", True), (b"L-7L\n.", -7), (b"F1.5\n.", 1.5), (b"S'a\\n'\n.", "a\n"),
    (b"Va\\u00fc\n.", "a\u00fc"), (b"T\x02\0\0\0ab.", "ab"), (b"U\x01a.", "a"),
    (b"(I1\n2l.", [1, 1]), (b"\x96\x01\0\0\0\0\0\0\0a.", b"a"), (b"Np3\n0g3\n.", None),
    (b"Np3\0x\n0g3\n.", None), (b"Nr\xff\xff\xff\xff.", None),
    (b"cos\nsystem\n.", Global("os", "system")),
]  # fmt: skip


def test_damaged_pickles_are_errors_and_rare_instructions_are_known() -> None:
    for data in DAMAGED:
        with pytest.raises(PickleError) as raised:
            run(data)
        assert len(str(raised.value)) < 300
    for data, value in VALUES:
        assert run(data) == value, data
    # C's unpickler reads `010` as 8 and stops at a zero byte, where `int` raises.
    for data in (b"I010\n.", b"I1\0x\n.", b"\x8a\xff" + b"\x01" * 255 + b"."):
        assert isinstance(run(data), Foreign)
    assert [each.kind for each in run(pickle.dumps([{1, 2}, {3}], 4))] == ["builtins.set"] * 2
    call = run(b"cos\nsystem\nX\x02\x00\x00\x00ls\x85R.")
    assert (call.kind, call.args) == ("os.system", ("ls",))


LARGEST = 2**60 - 1
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats(allow_nan=False)
    | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.tuples(inner, inner)
    | st.dictionaries(st.text(max_size=5) | st.integers(-LARGEST, LARGEST), inner, max_size=5),
    max_leaves=20,
)  # fmt: skip


@given(value=PLAIN, protocol=st.sampled_from([3, 4, 5]))
@settings(max_examples=50, deadline=None)
def test_plain_values_survive(value: Any, protocol: int) -> None:
    assert run(pickle.dumps(value, protocol)) == value


def test_pickles_that_are_deep_endless_or_slow_by_design(monkeypatch: pytest.MonkeyPatch) -> None:
    depth = 200_000
    value = run(b"(" * depth + b"t" * depth + b".")
    for _ in range(depth - 1):
        (value,) = value
    assert value == ()
    deep_key = b"}" + b")" + b"\x85" * depth + b"Ns."  # its hash would overflow the C stack
    assert [type(key) for key in run(deep_key)] == [Foreign]

    # Multiples of 2**61 - 1 all hash to 0: building a dictionary of them takes quadratic time.
    keys = b"".join(
        b"\x8a\x0a" + (n * (2**61 - 1)).to_bytes(10, "little") + b"N" for n in range(1, 40_001)
    )
    started = time.process_time()
    value = run(b"}(" + keys + b"u.")
    assert time.process_time() - started < 3  # a minute with the integers themselves as keys
    assert {type(key) for key in value} == {Foreign}
    assert len(value) == 40_000

    # A call takes 4 bytes, its name 8,000 characters: copies of it would be a memory bomb.
    name = b"c" + b"m" * 4000 + b"\n" + b"n" * 4000 + b"\nq\x000"
    value = run(b"]" + name + b"(" + b"h\x00)R" * 1000 + b"e.")
    assert len(value) == 1000
    assert len({id(foreign.kind) for foreign in value}) == 1

    monkeypatch.setattr("tasks.weights.pickled.program.MAX_STEPS", 1000)
    with pytest.raises(PickleError, match="1000"):
        run(b"N0" * 1000 + b"N.")
