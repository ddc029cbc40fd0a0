"""Headers of safetensors files are read as by the library, or refused by name."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from tasks.core.errors import ArtifactError
from tasks.weights.files.header import read_header

ARRAYS = {
    "b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a": np.arange(5, dtype=np.int8),
    "empty": np.zeros((0, 4), np.float16),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("header") / "good.safetensors"
    save_file(ARRAYS, path, metadata={"format": "pt"})
    return path.read_bytes()


def _entry(shape: list, begin: int, end: int, dtype: str = "U8") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_altered_bytes_give_an_error_or_what_safetensors_reads(
    tmp_path: Path, good: bytes, data: st.DataObject
) -> None:
    """A header that is accepted here is read the same way by the safetensors library."""
    raw = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(len(raw) // 2, len(raw)))]
    path = tmp_path / "mutated.safetensors"
    path.write_bytes(raw)
    try:
        tensors = read_header(path).tensors
    except ArtifactError:
        return
    with safe_open(path, framework="numpy") as file:
        assert set(file.keys()) == set(tensors)
        for name, info in tensors.items():
            assert info.shape == tuple(file.get_slice(name).get_shape())
            assert bytes(raw[info.start : info.end]) == file.get_tensor(name).tobytes()


BAD: list[tuple[object, str]] = [
    ({"a": _entry([9], 0, 9)}, "truncated: a"),
    ({"a": _entry([4], 0, 4), "b": _entry([4], 3, 7)}, "overlap"),
    ({"a": _entry([4], 0, 5)}, "5 bytes"),
    ({"a": _entry([-4], 0, 4)}, "shape"),
    ({"a": _entry([4], 0, 4, "Q3")}, "dtype Q3"),
    ({"a": {"dtype": "U8"}}, "entry for a"),
    ({"a": _entry([4], -4, 0)}, "a"),
    ({"a": _entry([4.0], 0, 4)}, "entry for a"),
    ({"a": _entry([4], 0, True)}, "entry for a"),
    ({"__metadata__": 7}, "__metadata__"),
    ({"__metadata__": {"a": 7}}, "__metadata__"),
    ({"a": _entry([4], 0, 4), "b": _entry([3], 5, 8)}, "1 bytes before b"),
    ({"a": _entry([4], 0, 4)}, "4 bytes after a"),
    ({"a": _entry([2**63, 0], 0, 0)}, "shape of 2 axes"),
    ({"a": _entry([10**4000] * 5000, 0, 8)}, "shape of 5000 axes"),
    ([1, 2], "JSON object"),
]


def test_errors_name_the_problem(tmp_path: Path, good: bytes) -> None:
    path, missed = tmp_path / "x.safetensors", []
    texts = [(json.dumps(entries).encode(), thing) for entries, thing in BAD]
    entry = json.dumps(_entry([1], 0, 1))
    texts.append((f'{{"a": {entry}, "a": {entry}}}'.encode(), "duplicate key a"))
    texts.append((b"[" * 200_000, "not JSON"))
    files = [(struct.pack("<Q", len(text)) + text + bytes(8), thing) for text, thing in texts]
    files += [(good[:length], "truncated") for length in (0, 3, 8)]
    files.append((struct.pack("<Q", 2**62) + b"{}", "header"))
    for raw, thing in files:
        path.write_bytes(raw)
        with pytest.raises(ArtifactError) as caught:
            read_header(path)
        if thing not in caught.value.message:
            missed.append((thing, caught.value.message))
    assert missed == []


def test_a_duplicate_among_many_tensors_is_found_fast(tmp_path: Path) -> None:
    """The search for a duplicate among 50,000 names is linear."""
    names = [f'"{n}":0' for n in range(50_000)]
    text = f"{{{','.join([*names, names[-1]])}}}".encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    started = time.process_time()
    with pytest.raises(ArtifactError, match="49999"):
        read_header(path)
    assert time.process_time() - started < 2  # 30 s when every name was counted
