"""Forks of warm processes on a machine with a GPU, with a stand-in for the device."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.evaluation.scoring import ReferenceScorer
from tests.conftest import PROJECT
from tests.serving.cuda_stand_in import LOST, STARTS

pytestmark = pytest.mark.slow
LOG = logging.getLogger("tests.serving")
VLLM = "from tasks.serving.vllm import child; child._import_vllm()"
SCORER = "from tasks.serving.reference import child; child._warm_up()"


@pytest.mark.parametrize("imports", [SCORER, VLLM], ids=["reference", "vllm"])
def test_nothing_initialises_cuda_before_a_fork(imports: str) -> None:
    program = f"""
from tests.serving import cuda_stand_in
cuda_stand_in.install()
{imports}
import torch
print("initialised", cuda_stand_in.initialised(), "GPU", torch.accelerator.is_available())
"""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTORCH_NVML")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=PROJECT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "initialised False GPU True" in done.stdout


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Initialise CUDA in every new process; return the file that lists the processes."""
    place = tmp_path / "site"
    place.mkdir()
    line = "from tests.serving import cuda_stand_in; cuda_stand_in.start()"
    (place / "sitecustomize.py").write_text(line)
    monkeypatch.setenv("PYTHONPATH", f"{place}{os.pathsep}{PROJECT}")
    monkeypatch.setenv(STARTS, str(tmp_path / "starts"))
    monkeypatch.setenv(LOST, "1")
    return tmp_path / "starts"


def test_a_request_gets_a_new_process_if_a_fork_has_lost_cuda(
    starts: Path, served: Path, tmp_path: Path
) -> None:
    with ReferenceScorer(log=LOG, log_path=tmp_path / "log", threads=1, timeout_s=240) as scorer:
        tokens = scorer.encode_texts(served, ["an ape"], limit=3)
    assert tokens == [[261, 223, 67]]
    lines = [line for line in starts.read_text().splitlines() if "--answer-to" in line]
    assert len(lines) == 1
    assert lines[0].endswith("--threads 1")
