"""Fixtures: DeepSpeed's own checkpoints, made once per session by one launch of two ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.weights.files.tensors import Tensors
from tests.commands import run_ranks


def save_checkpoints(root: Path, world_size: int) -> Path:
    """Save every case of `save_checkpoints.py` below `root`."""
    run_ranks(
        "tests.weights.deepspeed.save_checkpoints",
        str(root),
        log_path=root.with_suffix(".log"),
        ranks=world_size,
        TORCHDYNAMO_DISABLE="1",
    )
    return root


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the checkpoints of two ranks, one folder per case."""
    return save_checkpoints(tmp_path_factory.mktemp("zero") / "two", 2)


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copy a case, to damage it."""
    return lambda name: Path(shutil.copytree(saved / name, tmp_path / name))


def read(tensors: Tensors, name: str) -> bytes:
    """Read a tensor's bytes from the byte ranges of its source."""
    pieces = []
    for extent in tensors[name].extents:
        with extent.path.open("rb") as file:
            file.seek(extent.start)
            pieces.append(file.read(extent.nbytes))
            assert len(pieces[-1]) == extent.nbytes
    return b"".join(pieces)
