"""Forks of warm processes on a machine with a GPU, with a stand-in for the device."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.config.after_training import Smoke
from tasks.evaluation.scoring import ReferenceScorer
from tasks.serving.vllm.job import Job, run_vllm
from tests.serving.cuda_stand_in import LOST, STARTS

PROJECT = Path(__file__).parents[2]
LOG = logging.getLogger("tests.serving")
VLLM = "from tasks.serving.vllm import child; child._import_vllm()"
SCORER = "from tasks.serving.reference import child; child._warm_up()"
CASES = [
    pytest.param(SCORER, id="reference"),
    pytest.param(VLLM, id="vllm", marks=pytest.mark.slow),
]
ENGINE = """
import torch
from types import SimpleNamespace as N

class LLM:
    def __init__(self, **_):
        torch.cuda._lazy_init()

    def classify(self, inputs, use_tqdm):
        return [N(outputs=N(probs=[len(one["prompt_token_ids"])])) for one in inputs]
"""


@pytest.mark.parametrize("imports", CASES)
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


@pytest.mark.slow
def test_a_job_gets_a_new_process_if_a_fork_has_lost_cuda(starts: Path, tmp_path: Path) -> None:
    (tmp_path / "site" / "vllm.py").write_text(ENGINE)
    served = tmp_path / "served"
    served.mkdir()
    jobs = [
        Job(str(served), str(tmp_path / name), [[1] * n], 1, 16, rewards=True)
        for name, n in (("first", 3), ("second", 5))
    ]
    results = run_vllm(jobs, Smoke(), log=LOG, log_path=tmp_path / "log")
    assert [result["rewards"] for result in results] == [[3.0], [5.0]]
    alone = [line.split()[-1] for line in starts.read_text().splitlines() if "--alone" in line]
    assert alone == [str(tmp_path / name / "job.json") for name in ("first", "second")]


@pytest.mark.slow
def test_a_request_gets_a_new_process_if_a_fork_has_lost_cuda(
    starts: Path, served: Path, tmp_path: Path
) -> None:
    with ReferenceScorer(log=LOG, log_path=tmp_path / "log", threads=1, timeout_s=240) as scorer:
        tokens = scorer.encode_texts(served, ["an ape"], limit=3)
    assert tokens == [[261, 223, 67]]
    lines = [line for line in starts.read_text().splitlines() if "--answer-to" in line]
    assert len(lines) == 1
    assert lines[0].endswith("--threads 1")
