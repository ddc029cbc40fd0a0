"""Zip files around a pickle that are damaged, altered, or not written by torch."""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tasks.core.errors import ArtifactError
from tasks.weights.pickled.archive import read_archive
from tasks.weights.pickled.tensors import TensorRef, read_torch_file

GOOD = {
    "weight": torch.randn(5, 3, generator=torch.Generator().manual_seed(1)),
    "half": torch.arange(7).to(torch.bfloat16),
    "part": torch.arange(50.0)[10:20],
    "flags": torch.tensor([True, False]),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "good.pt"
    torch.save({**GOOD, "nested": {"size": torch.Size([2, 3]), "list": [1, 2.5, "x", None]}}, path)
    return path.read_bytes()


def zipped(path: Path, records: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in records.items():
            file.writestr(f"x/{name}", data)
    return path


def test_other_files_and_records_are_refused(
    tmp_path: Path, good: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.pt"
    for content in (b"", b"PK", b"PK\x03\x04", b"{}", b"\x00" * 100):
        path.write_bytes(content)
        with pytest.raises(ArtifactError):
            read_torch_file(path)
    with pytest.raises(ArtifactError, match=r"absent\.pt"):
        read_torch_file(tmp_path / "absent.pt")
    zipped(path, {"data.pkl": b"N." * 50}, zipfile.ZIP_DEFLATED)
    with pytest.raises(ArtifactError, match="compressed"):
        read_archive(path)
    zipped(path, {"data.pkl": b"N.", "byteorder": b"big"})
    with pytest.raises(ArtifactError, match="big-endian"):
        read_torch_file(path)
    zipped(path, {"data.pkl": b"N.", "n" * 2000: b""})
    with pytest.raises(ArtifactError, match="2002"):
        read_archive(path)
    with zipfile.ZipFile(path, "w") as file:
        for number in range(500):
            file.writestr(f"{number:03d}/x{number}", b"")
    with pytest.raises(ArtifactError, match="000, 001, 002") as raised:
        read_archive(path)
    assert len(raised.value.message) < 300
    monkeypatch.setattr("tasks.weights.pickled.tensors.MAX_PICKLE_BYTES", 99)
    zipped(path, {"data.pkl": b"N." * 50})
    with pytest.raises(ArtifactError, match="99"):
        read_torch_file(path)
    monkeypatch.setattr("tasks.weights.pickled.directory.MAX_DIRECTORY", 10)
    path.write_bytes(good)
    with pytest.raises(ArtifactError, match="directory"):
        read_archive(path)


def view(path: Path) -> Any:
    """Return a file's contents and the byte ranges of its tensors."""
    file = read_torch_file(path)
    refs = {n: file.extent(v) for n, v in file.content.items() if isinstance(v, TensorRef)}
    return repr(file.content), refs


KINDS = st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255))


@given(flips=st.lists(KINDS, min_size=1, max_size=3))
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
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
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_truncated_file_is_an_error(good: bytes, tmp_path: Path, end: float) -> None:
    (tmp_path / "x.pt").write_bytes(good[: int(end * len(good))])
    with pytest.raises(ArtifactError):
        read_torch_file(tmp_path / "x.pt")


@given(flips=st.lists(KINDS, min_size=1, max_size=4))
@example(flips=[(0.5, 1)])
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_hostile_pickle_ends_in_a_value_or_an_error(
    good: bytes, tmp_path: Path, flips: list[tuple[float, int]]
) -> None:
    # The checksum is corrected, so that the pickle interpreter itself is tested.
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
