"""Fixtures: DeepSpeed's own checkpoints, made once per session by one launch of two ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

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
