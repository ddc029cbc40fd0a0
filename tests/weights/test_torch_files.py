"""Files of `torch.save` read without torch: compared with torch; damaged, hostile, endless."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tasks.core.errors import ArtifactError
from tasks.weights.files.dtypes import torch_dtype
from tasks.weights.files.tensors import Tensor, read_all
from tasks.weights.pickled.torch_file import read_state, read_torch_file
from tasks.weights.pickled.unpickler import Foreign, Walker

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


def loaded(ref: Tensor) -> torch.Tensor:
    raw = read_all(ref).tobytes()
    dtype = torch.uint16 if ref.dtype == "U16" else torch_dtype(ref.dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(ref.shape)


def test_tensors_equal_torchs(tmp_path: Path) -> None:
    for protocol in (2, 5):
        torch.save(GOOD, tmp_path / "x.pt", pickle_protocol=protocol)
        content = read_torch_file(tmp_path / "x.pt")
        assert list(content) == list(GOOD)
        for name, want in GOOD.items():
            have = loaded(content[name])
            assert (have.dtype, have.shape) == (want.dtype, want.shape)
            assert torch.equal(*(t.detach().view(-1).view(torch.uint8) for t in (have, want))), name


def test_attributes_in_a_pickle_change_no_tensor(tmp_path: Path) -> None:
    """Ranges that a file chooses would put bytes of any other file into the delivered weights."""

    class Changed:
        def __reduce_ex__(self, _: Any) -> Any:
            made = torch.ones(3).__reduce_ex__(2)
            return (*made[:2], {"extents": (1,), "shape": (9,), "dtype": "U8"})

    torch.save({"a": Changed()}, tmp_path / "x.pt")
    assert torch.equal(loaded(read_torch_file(tmp_path / "x.pt")["a"]), torch.ones(3))


@pytest.mark.parametrize("key", [b"N" + b"2\x86" * 22, b"\x8a\x09" + b"\xff" * 8 + b"\0"])
def test_keys_take_no_time(key: bytes) -> None:
    """Nested tuples are hashed again for each use, and large integers may have one hash."""
    for start, fill in ((b"}", b"s."), (b"(", b"d.")):
        (made,) = Walker(start + key + b"N" + fill).value()
        assert isinstance(made, Foreign)


def test_files_beyond_4_gb(tmp_path: Path) -> None:
    count = (5 << 30) // 4
    path = tmp_path / "x.pt"
    with torch.serialization.skip_data():  # sparse: only the table is written and read
        torch.save({"a": torch.empty(count), "b": torch.ones(3)}, path)
    content = read_torch_file(path)
    assert content["a"].shape == (count,)
    assert content["a"].nbytes == 5 << 30
    assert content["b"].extents[0].start > 5 << 30
    torch.save(torch.ones(3), tmp_path / "small.pt")
    with path.open("r+b") as file:  # the shard of a large `.distcp` file
        start = file.seek(0, os.SEEK_END)
        file.write((tmp_path / "small.pt").read_bytes())
    shard = read_torch_file(path, start, path.stat().st_size)
    assert torch.equal(loaded(shard), torch.ones(3))


class Attack:
    """Object that touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_code_is_never_run(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    torch.save({"weight": torch.ones(2), "evil": Attack(touched)}, tmp_path / "x.bin")
    content = read_torch_file(tmp_path / "x.bin")
    assert content["evil"].kind == "posix.system"
    assert isinstance(content["weight"], Tensor)
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


def view(path: Path) -> str:
    """Return a file's contents with the byte ranges of its tensors."""
    return repr(read_torch_file(path))


def test_a_flipped_byte_is_an_error_or_changes_nothing(good: bytes, tmp_path: Path) -> None:
    """A file that is cut is always an error."""
    path, random = tmp_path / "good.pt", Random(0)
    path.write_bytes(good)
    before = view(path)
    for _ in range(300):
        raw = bytearray(good)
        raw[random.randrange(len(raw))] ^= random.choice([1, 16, random.randrange(1, 256)])
        path.write_bytes(raw)
        with suppress(ArtifactError):
            assert view(path) == before
        path.write_bytes(good[: random.randrange(len(good))])
        with pytest.raises(ArtifactError):
            read_torch_file(path)
