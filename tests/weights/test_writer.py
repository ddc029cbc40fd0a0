from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from tasks.errors import ArtifactError, ConfigError
from tasks.weights.writer import (
    CheckpointWriter,
    Spec,
    parse_size,
    plan_shards,
    require_space,
    shard_names,
)

SPECS = [Spec("odd", (3,), "U8"), Spec("wide", (2, 2), "F32"), Spec("none", (0, 5), "BF16")]
BYTES = {"odd": b"abc", "wide": np.arange(4, dtype=np.float32).tobytes(), "none": b""}


def _write(out: Path, **settings) -> CheckpointWriter:
    with CheckpointWriter(out, SPECS, **settings) as writer:
        for name, data in BYTES.items():
            writer.append(name, data)
    return writer


def _append_all(out: Path, pieces) -> None:
    with CheckpointWriter(out, SPECS, max_shard_bytes=8) as writer:
        for name, data in pieces:
            writer.append(name, data)


def test_safetensors_reads_what_was_written(tmp_path: Path) -> None:
    writer = _write(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(BYTES)
        assert file.get_tensor("odd").tobytes() == b"abc"
        assert file.get_tensor("wide").tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert writer.written.sha256["odd"] == hashlib.sha256(b"abc").hexdigest()


def test_tensors_are_aligned_to_their_own_width(tmp_path: Path) -> None:
    from tasks.weights.header import read_header

    _write(tmp_path)
    assert read_header(tmp_path / "model.safetensors").tensors["wide"].start % 4 == 0


def test_shards_and_their_index(tmp_path: Path) -> None:
    _write(tmp_path, max_shard_bytes=16)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 19
    assert index["weight_map"] == {
        "odd": "model-00001-of-00002.safetensors",
        "wide": "model-00002-of-00002.safetensors",
        "none": "model-00002-of-00002.safetensors",
    }


def test_pieces_in_order_make_the_tensor(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, SPECS[:1]) as writer:
        for piece in (b"a", b"", b"bc"):
            writer.append("odd", piece)
    assert (tmp_path / "model.safetensors").read_bytes().endswith(b"abc")


def test_an_unwritten_tensor_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="wide: 4 of 16 bytes"):
        _append_all(tmp_path, [("odd", b"abc"), ("wide", b"1234")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [("odd", b"abcd", "3 bytes, 4 were written"), ("other", b"", "not planned")],
)
def test_what_was_not_planned_is_refused(tmp_path: Path, name: str, data: bytes, message: str):
    with pytest.raises(ArtifactError, match=message):
        _append_all(tmp_path, [(name, data)])
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_written_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="6 were written"):
        _append_all(tmp_path, [("odd", b"abc"), ("odd", b"abc")])


def test_a_name_planned_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="planned twice: odd"):
        CheckpointWriter(tmp_path, [SPECS[0], SPECS[0]])


def test_an_error_inside_the_block_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        _append_all(tmp_path, (("odd", bytes(3 // i)) for i in (1, 0)))
    assert list(tmp_path.iterdir()) == []


FULL_DISK = """
import resource, sys, signal
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tasks.errors import ArtifactError
from tasks.weights.writer import CheckpointWriter, Spec
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
specs = [Spec("a", (1000,), "F32"), Spec("b", (1 << 20,), "F32")]
try:
    with CheckpointWriter(Path(sys.argv[2]), specs, max_shard_bytes=4096) as writer:
        writer.append("a", bytes(4000))
        writer.append("b", bytes(4 << 20))
except ArtifactError as error:
    print(error.report())
"""


def test_a_file_that_cannot_grow_is_a_clear_error_and_leaves_no_file(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(root), str(tmp_path)],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert f"cannot write: {os.strerror(errno.EFBIG)}" in done.stdout
    assert "paths.runs=" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_midway_leaves_no_file(tmp_path: Path, monkeypatch) -> None:
    real, written = os.pwrite, []

    def fill(handle: int, data: memoryview, at: int) -> int:
        written.append(len(data))
        if len(written) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, data[: max(1, len(data) // 2)], at)  # short writes on the way

    monkeypatch.setattr(os, "pwrite", fill)
    with pytest.raises(ArtifactError, match="No space left on device"):
        _write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_found_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="are free"):
        require_space(tmp_path, 1 << 62)
    giant = [Spec("giant", (1 << 60,), "F32")]
    with pytest.raises(ArtifactError, match="will be written"), CheckpointWriter(tmp_path, giant):
        pass
    assert list(tmp_path.iterdir()) == []


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=30), limit=st.integers(1, 60))
def test_shards_keep_order_lose_nothing_and_are_full(sizes: list[int], limit: int) -> None:
    specs = [Spec(str(i), (size,), "U8") for i, size in enumerate(sizes)]
    shards = plan_shards(specs, limit)
    assert [spec for shard in shards for spec in shard] == specs
    assert all(shards)
    totals = [sum(spec.nbytes for spec in shard) for shard in shards]
    for shard, total in zip(shards, totals, strict=True):
        assert total <= limit or len([s for s in shard if s.nbytes]) == 1
    for total, following in zip(totals, shards[1:], strict=False):
        assert total + following[0].nbytes > limit
    assert len(shard_names(len(shards))) == len(shards)


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("200kb", 200_000), (77, 77), ("9", 9)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["5TB", "GB", "-1", "0", "1e9"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="max_shard_size"):
        parse_size(text)
