"""A real full file system: a clear error, nothing visible, and the next run continues."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import PROJECT
from tests.weights.execute.small_disk import NAMES, RANK, SHAPE, merge_into

ALONE = ["unshare", "-rm"]


def _why_not() -> str:
    if shutil.which("unshare") is None:
        return "no `unshare` here"
    probe = [*ALONE, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/tmp"]
    ended = subprocess.run(probe, capture_output=True, text=True, timeout=30)
    return f"no file system of our own can be mounted here: {ended.stderr}" * bool(ended.returncode)


WHY_NOT = _why_not()


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    random = torch.Generator().manual_seed(0)
    rows, columns = SHAPE
    base = {name: torch.randn(SHAPE, generator=random).bfloat16() for name in NAMES}
    adapter = {}
    for name in NAMES:
        adapter[f"{name}.A"] = torch.randn(RANK, columns, generator=random)
        adapter[f"{name}.B"] = torch.randn(rows, RANK, generator=random)
    for folder, tensors in (("base", base), ("adapter", adapter)):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
    return tmp_path


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it can")
def test_disk_full_before_during_and_at_the_end_of_a_run(inputs: Path) -> None:
    disk, plain = inputs / "disk", inputs / "plain" / "model"
    disk.mkdir()
    command = [
        *ALONE,
        sys.executable,
        "-m",
        "tests.weights.execute.small_disk",
        str(inputs),
        str(disk),
    ]
    ended = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    results = json.loads(ended.stdout)

    assert "are free" in results["before"]["error"][0]
    assert (results["before"]["left"], results["before"]["entries"]) == ([], 0)
    for when in ("midst", "end"):
        message, hint = results[when]["error"]
        assert "cannot write: No space left on device" in message
        assert "paths.runs=" in hint
        assert results[when]["left"] == [".model.tmp"]  # hidden, for the next run
    assert 0 < results["midst"]["entries"] < len(NAMES)
    assert results["end"]["entries"] == len(NAMES)
    assert results["last"]["resumed"] == len(NAMES)
    assert results["last"]["left"] == ["model"]

    merge_into(inputs, plain, lambda: None)
    whole = (plain / "model.safetensors").read_bytes()
    assert results["last"]["sha256"] == hashlib.sha256(whole).hexdigest()
