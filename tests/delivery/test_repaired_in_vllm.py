"""Folders that vLLM cannot load are loaded after `fix=true`, and give the same tokens."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.config.after_training import Smoke
from tasks.serving.vllm.job import Job, run_vllm
from tests.conftest import PROJECT
from tests.delivery.conftest import one_thread
from tests.delivery.test_deliver import servable
from tests.weights.heads.making import head_tensors

NEW = 8
PROMPTS = [[65, 66, 67], [10, 200, 30, 40], [5]]
SINGLE = "model.safetensors"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def _stripped(state: dict[str, torch.Tensor], folder: Path) -> None:
    """Save a model with the prefixes of torch.compile, DataParallel and peft."""
    keys = {f"module._orig_mod.base_model.model.{name}": tensor for name, tensor in state.items()}
    save_file(keys, folder / SINGLE, metadata={"format": "pt"})


def _value_head(state: dict[str, torch.Tensor], folder: Path) -> None:
    head = {name: tensor.bfloat16() for name, tensor in head_tensors(hidden=128).items()}
    save_file({**state, **head}, folder / SINGLE, metadata={"format": "pt"})


def _pickled(state: dict[str, torch.Tensor], folder: Path) -> None:
    (folder / SINGLE).unlink()
    prefixed = {f"module.{name}": tensor for name, tensor in state.items()}
    torch.save(prefixed, folder / "pytorch_model.bin")


BROKEN = {"residue": _stripped, "head": _value_head, "bin": _pickled}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return servable(tmp_path_factory.mktemp("repaired") / "good")


def audited(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the real audit command."""
    return subprocess.run(
        [sys.executable, str(PROJECT / "flows" / "audit.py"), *arguments],
        cwd=cwd, env=one_thread(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def answers(folders: list[Path], place: Path) -> list[list[list[int]]]:
    """Return the greedy tokens of each folder, by prompt, each in its own engine."""
    jobs = [
        Job(str(folder), str(place / folder.name), PROMPTS, NEW, max_model_len=32)
        for folder in folders
    ]
    log = logging.getLogger("tests.deliver")
    done = run_vllm(jobs, Smoke(timeout_s=800, threads=2), log=log, log_path=place / "vllm.log")
    return [result["served"]["tokens"] for result in done]


def test_it_is_loaded_and_answers_as_the_model_that_was_saved(good: Path, tmp_path: Path) -> None:
    repaired = []
    for name, make in BROKEN.items():
        broken, out = tmp_path / f"broken-{name}", tmp_path / name
        shutil.copytree(good, broken)
        make(load_file(good / SINGLE), broken)
        assert audited(f"source={broken}", cwd=tmp_path).returncode == 1
        done = audited(f"source={broken}", "fix=true", f"out_dir={out}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        again = audited(f"source={out}", "values=true", "out=-", cwd=tmp_path)
        assert json.loads(again.stdout)["ok"], again.stdout
        repaired.append(out)
    wanted, *actual = answers([good, *repaired], tmp_path / "vllm")
    assert len({tuple(tokens) for tokens in wanted}) == len(PROMPTS)
    assert all(0 < len(tokens) <= NEW for tokens in wanted)
    assert actual == [wanted] * len(repaired)
