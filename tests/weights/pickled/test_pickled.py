"""Torch's zip files read without torch: against torch itself, and against hostile input."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tasks.errors import ArtifactError
from tasks.weights.pickled import archive as archive_module
from tasks.weights.pickled.archive import read_archive
from tasks.weights.pickled.machine import Foreign, Global, Machine, PickleError
from tasks.weights.pickled.state import read_state
from tasks.weights.pickled.tensors import TensorRef, TorchFile, read_torch_file
from tasks.weights.reader import torch_dtype
from tests.weights.zero.conftest import read

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


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def loaded(file: TorchFile, ref: TensorRef) -> torch.Tensor:
    extent = file.extent(ref)
    raw = extent.path.read_bytes()[extent.start : extent.start + extent.nbytes]
    dtype = torch.uint16 if ref.dtype == "U16" else torch_dtype(ref.dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(ref.shape)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "good.pt"
    torch.save({**GOOD, "nested": {"size": torch.Size([2, 3]), "list": [1, 2.5, "x", None]}}, path)
    return path.read_bytes()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_tensors_are_torchs_own(tmp_path: Path, protocol: int) -> None:
    torch.save(GOOD, tmp_path / "x.pt", pickle_protocol=protocol)
    file = read_torch_file(tmp_path / "x.pt")
    assert list(file.content) == list(GOOD)
    for name, want in GOOD.items():
        have = loaded(file, file.content[name])
        assert (have.dtype, have.shape) == (want.dtype, want.shape)
        assert raw_bytes(have) == raw_bytes(want), name


def test_containers_numbers_and_text_come_back(tmp_path: Path) -> None:
    value = OrderedDict(
        a=[1, -1, 255, 70_000, 2**40, -(2**70), 1.5, True, None, b"\x00\xff", "ü" * 300],
        b=({"x": ()}, torch.Size([4, 5])),
    )
    value[3] = {"deep": [[[[()]]]]}
    torch.save(value, tmp_path / "x.pt")
    content = read_torch_file(tmp_path / "x.pt").content
    assert content["a"][:9] + content["a"][10:] == value["a"][:9] + value["a"][10:]
    assert content["b"] == ({"x": ()}, (4, 5))
    assert content[3] == value[3]


def test_no_checksums(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(GOOD, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert list(read_torch_file(tmp_path / "x.pt").content) == list(GOOD)


def test_files_beyond_4_gb(tmp_path: Path) -> None:
    # Sparse: only the table is written and read.
    count = (5 << 30) // 4
    path = tmp_path / "x.pt"
    with torch.serialization.skip_data():
        torch.save({"a": torch.empty(count), "b": torch.ones(3)}, path)
    file = read_torch_file(path)
    assert file.content["a"].shape == (count,)
    assert file.extent(file.content["a"]).nbytes == 5 << 30
    assert file.extent(file.content["b"]).start > 5 << 30


class Attack:
    """Would touch a file when unpickled."""

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
    with pytest.raises(ArtifactError, match="'evil': no tensor"):
        read_state(tmp_path / "x.bin")
    assert not touched.exists()
    torch.load(tmp_path / "x.bin", weights_only=False)  # the attack is real
    assert touched.exists()


def test_a_state_dict_is_a_source(tmp_path: Path) -> None:
    torch.save(GOOD, tmp_path / "adapter_model.bin")
    source = read_state(tmp_path / "adapter_model.bin")
    assert set(source.tensors) == set(GOOD)
    for name, want in GOOD.items():
        assert read(source, name) == raw_bytes(want)
        assert source.sha256(name) is None


@pytest.mark.parametrize(
    ("state", "finding"),
    [
        ({"a": torch.empty(0)}, "a: has no elements, shape [0]"),
        ({"a": torch.ones(3, 2).t()}, "a: strides"),
        ({"a": 3}, "'a': no tensor"),
        ({}, "it is empty"),
        ([torch.ones(2)], "holds a list"),
    ],
)
def test_what_is_no_state_dict_is_refused(tmp_path: Path, state: Any, finding: str) -> None:
    torch.save(state, tmp_path / "x.bin")
    with pytest.raises(ArtifactError) as raised:
        read_state(tmp_path / "x.bin")
    assert finding in raised.value.message


def test_torchs_old_format_is_refused_by_name(tmp_path: Path) -> None:
    torch.save(GOOD["weight"], tmp_path / "x.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(ArtifactError, match="before 1.6") as raised:
        read_state(tmp_path / "x.bin")
    assert "torch.save" in raised.value.hint


@pytest.mark.parametrize("content", [b"", b"PK", b"PK\x03\x04", b"{}", b"\x00" * 100])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(ArtifactError):
        read_torch_file(tmp_path / "x.pt")
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_torch_file(tmp_path / "absent.pt")


def zipped(path: Path, records: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in records.items():
            file.writestr(f"x/{name}", data)
    return path


def test_compressed_records_are_refused(tmp_path: Path) -> None:
    path = zipped(tmp_path / "x.pt", {"data.pkl": b"N." * 50}, zipfile.ZIP_DEFLATED)
    with pytest.raises(ArtifactError, match="compressed"):
        read_archive(path)


def test_a_huge_pickle_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = zipped(tmp_path / "x.pt", {"data.pkl": b"N." * 50})
    monkeypatch.setattr("tasks.weights.pickled.tensors.MAX_PICKLE_BYTES", 99)
    with pytest.raises(ArtifactError, match="100 bytes, allowed: 99"):
        read_torch_file(path)


def test_another_byte_order_is_refused(tmp_path: Path) -> None:
    path = zipped(tmp_path / "x.pt", {"data.pkl": b"N.", "byteorder": b"big"})
    with pytest.raises(ArtifactError, match="big-endian"):
        read_torch_file(path)


def run(data: bytes) -> Any:
    return Machine(data, persistent=lambda _: None, reduce=lambda t, a: Foreign(str(t), a)).run()


@pytest.mark.parametrize(
    "data",
    [
        b"", b".", b"N", b"NN.", b"N..", b"(.", b"(N.", b"u.", b"}Nu.", b"}(Nu.", b"]s.", b"NR.",
        b"h\x00.", b"cposix\n", b"X\xff\xff\xff\xff", b"\x8e" + b"\xff" * 8,
        b"\x8b\x00\x00\x00\x7f",
        b"\x8a\xff" + b"\x01" * 255 + b".", b"I1\n.", b"X\x01\x00\x00\x00\xff.", b"\x93.", b"00",
        b"\x96" + b"\xff" * 8 + b".", b"r\xff\xff\xff\xff.", b"N\x87.", b"(N\x86.", b"Q.", b"b.",
        b"}X" + struct.pack("<I", 5000) + b"k" * 5000 + b"Ns.",
    ],
)  # fmt: skip
def test_damaged_pickles_are_errors(data: bytes) -> None:
    with pytest.raises(PickleError):
        run(data)


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
    monkeypatch.setattr("tasks.weights.pickled.machine.MAX_STEPS", 1000)
    with pytest.raises(PickleError, match="1000 instructions"):
        run(b"N0" * 1000 + b"N.")


def test_what_is_called_is_only_named() -> None:
    found = run(b"cos\nsystem\nX\x02\x00\x00\x00ls\x85R.")
    assert (found.kind, found.args) == ("os.system", ("ls",))
    assert run(b"cos\nsystem\n.") == Global("os", "system")


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats(allow_nan=False)
    | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.tuples(inner, inner)
    | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=5),
    max_leaves=20,
)  # fmt: skip


@given(value=plain, protocol=st.sampled_from([3, 4, 5]))
@settings(max_examples=100, deadline=None)
def test_plain_values_survive(value: Any, protocol: int) -> None:
    assert run(pickle.dumps(value, protocol)) == value


def view(path: Path) -> Any:
    """What a reader learns of a file: contents, and where the tensors lie."""
    file = read_torch_file(path)
    refs = {n: file.extent(v) for n, v in file.content.items() if isinstance(v, TensorRef)}
    return repr(file.content), refs


KINDS = st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255))


@given(flips=st.lists(KINDS, min_size=1, max_size=3))
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_flipped_byte_is_an_error_or_changes_nothing(
    good: bytes, tmp_path: Path, flips: list[tuple[float, int]]
) -> None:
    raw = bytearray(good)
    for at, mask in flips:
        raw[int(at * len(raw))] ^= mask
    path = tmp_path / "good.pt"
    path.write_bytes(good)
    before = view(path)
    path.write_bytes(raw)
    try:
        after = view(path)
    except ArtifactError:
        return
    assert after == before


@given(end=st.floats(0, 1, exclude_max=True))
@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_truncated_file_is_an_error(good: bytes, tmp_path: Path, end: float) -> None:
    (tmp_path / "x.pt").write_bytes(good[: int(end * len(good))])
    with pytest.raises(ArtifactError):
        read_torch_file(tmp_path / "x.pt")


@given(flips=st.lists(KINDS, min_size=1, max_size=4))
@example(flips=[(0.5, 1)])
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_hostile_pickle_ends_in_a_value_or_an_error(
    good: bytes, tmp_path: Path, flips: list[tuple[float, int]]
) -> None:
    # The checksum is made to fit, so that the machine itself is what is tried here.
    path = tmp_path / "x.pt"
    path.write_bytes(good)
    record = read_archive(path).records["data.pkl"]
    raw = bytearray(good)
    for at, mask in flips:
        raw[record.start + int(at * record.nbytes)] ^= mask
    data = bytes(raw[record.start : record.start + record.nbytes])
    crc = struct.pack("<I", zlib.crc32(data))
    directory = raw.index(b"PK\x01\x02")
    raw[directory + 16 : directory + 20] = crc
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


def test_the_directory_is_bounded(good: bytes, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "x.pt").write_bytes(good)
    monkeypatch.setattr(archive_module, "_MAX_DIRECTORY", 10)
    with pytest.raises(ArtifactError, match="directory ends"):
        read_archive(tmp_path / "x.pt")
