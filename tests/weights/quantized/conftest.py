"""Fixtures: one packed base per session, and copies of it to damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tasks.pipeline.artifact import Artifact
from tests.weights.quantized.making import pack


@pytest.fixture(scope="session")
def nf4(tmp_path_factory: pytest.TempPathFactory, qwen: Artifact) -> Path:
    """A tied model in NF4 with double quantization."""
    root = tmp_path_factory.mktemp("nf4") / "model"
    pack(qwen.path, root)
    return root


@pytest.fixture
def copy(nf4: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(nf4, tmp_path / "copy"))
