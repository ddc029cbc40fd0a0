"""Deliver an adapter of the main job with `flows/deliver.py`, which knows its base."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.commands import environment
from tests.conftest import PROJECT
from tests.e2e.conftest import Run


@pytest.fixture
def deliver(chain: Run, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Run the literal command in the store of the main job; returns (status, output)."""

    def run(*arguments: str) -> tuple[int, str]:
        program = [sys.executable, str(PROJECT / "flows" / "deliver.py"), *arguments]
        words = [*program, f"paths.runs={chain.runs}", "smoke.engine=none"]
        done = subprocess.run(
            words, cwd=tmp_path, env=environment() | {"OMP_NUM_THREADS": "1"}, timeout=280,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        return done.returncode, done.stdout

    return run


@pytest.fixture
def lookalike(chain: Run, tmp_path: Path) -> Path:
    """A base with the same names and shapes, other numbers, and no manifest."""
    folder = Path(shutil.copytree(chain.stage("prepare_base")["artifact"], tmp_path / "chat"))
    (folder / "manifest.json").unlink()
    for file in folder.glob("*.safetensors"):
        state = {
            k: (tensor.float() * 1.25).to(tensor.dtype) for k, tensor in load_file(file).items()
        }
        save_file(state, file, metadata={"format": "pt"})
    return folder


def test_an_adapter_is_refused_on_a_base_of_the_same_shape(
    deliver: Callable[..., tuple[int, str]], chain: Run, lookalike: Path, tmp_path: Path
) -> None:
    base = chain.artifact("prepare_base")
    adapter, out = chain.stage("gather")["artifact"], tmp_path / "out"
    latest = os.readlink(chain.runs / "latest")
    status, output = deliver(f"source={adapter}", f"base={lookalike}", f"out={out}")
    assert status == 2, output
    assert f"wrong base: trained on {base}; the weights in {lookalike} are others" in output
    assert "check_base=false takes this one all the same" in output
    assert not out.exists()
    assert os.readlink(chain.runs / "latest") == latest, "a refusal is no run"

    status, output = deliver(f"source={adapter}", f"base={lookalike}", f"out={out}",
                           "check_base=false")  # fmt: skip
    assert status == 0, output
    assert f"warning: trained on {base}" in output
    assert (out / "manifest.json").is_file()


def test_the_base_is_found_and_the_result_is_bit_identical(
    deliver: Callable[..., tuple[int, str]], chain: Run, tmp_path: Path
) -> None:
    adapter, out = chain.stage("gather")["artifact"], tmp_path / "out"
    status, output = deliver(f"source={adapter}", f"out={out}")
    assert status == 0, output
    assert f"base: {chain.stage('prepare_base')['artifact']}" in output
    served = Path(chain.summary["served"])
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (out, served)]
    assert manifests[0]["tensors"] == manifests[1]["tensors"]
    delivered, trained = (load_file(folder / "model.safetensors") for folder in (out, served))
    assert all(torch.equal(delivered[name], trained[name]) for name in trained)
