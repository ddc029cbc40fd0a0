"""What the chain made, delivered by the other program: it knows which base it belongs to."""

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

from tests.flows.conftest import PROJECT, Run, environment


@pytest.fixture
def deliver(qlora: Run, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """The literal command, in the store of the main job; (status, output)."""

    def run(*arguments: str) -> tuple[int, str]:
        program = [sys.executable, str(PROJECT / "flows" / "deliver.py"), *arguments]
        given = [*program, f"paths.runs={qlora.runs}", "smoke.engine=none"]
        done = subprocess.run(
            given, cwd=tmp_path, env=environment() | {"OMP_NUM_THREADS": "1"}, timeout=280,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        return done.returncode, done.stdout

    return run


@pytest.fixture
def lookalike(qlora: Run, tmp_path: Path) -> Path:
    """The base's names and shapes, other numbers; no manifest, as somebody downloaded it."""
    folder = Path(shutil.copytree(qlora.stage("prepare_base")["artifact"], tmp_path / "chat"))
    (folder / "manifest.json").unlink()
    for file in folder.glob("*.safetensors"):
        state = {name: (one.float() * 1.25).to(one.dtype) for name, one in load_file(file).items()}
        save_file(state, file, metadata={"format": "pt"})
    return folder


def test_an_adapter_is_refused_on_a_base_of_the_same_shape(
    deliver: Callable[..., tuple[int, str]], qlora: Run, lookalike: Path, tmp_path: Path
) -> None:
    base = Path(qlora.stage("prepare_base")["artifact"])
    adapter, out = qlora.stage("gather")["artifact"], tmp_path / "out"
    latest = os.readlink(qlora.runs / "latest")
    status, said = deliver(f"source={adapter}", f"base={lookalike}", f"out={out}")
    assert status == 2, said
    assert f"wrong base: trained on {base}; the weights in {lookalike} are others" in said
    assert "check_base=false takes this one all the same" in said
    assert not out.exists()
    assert os.readlink(qlora.runs / "latest") == latest, "a refusal is no run"

    status, said = deliver(f"source={adapter}", f"base={lookalike}", f"out={out}",
                           "check_base=false")  # fmt: skip
    assert status == 0, said
    assert f"warning: trained on {base}" in said
    assert (out / "manifest.json").is_file()


def test_the_chains_own_base_is_found_and_gives_the_chains_own_bytes(
    deliver: Callable[..., tuple[int, str]], qlora: Run, tmp_path: Path
) -> None:
    adapter, out = qlora.stage("gather")["artifact"], tmp_path / "out"
    status, said = deliver(f"source={adapter}", f"out={out}")
    assert status == 0, said
    assert f"base: {qlora.stage('prepare_base')['artifact']}" in said
    served = Path(qlora.summary["served"])
    manifests = [json.loads((one / "manifest.json").read_text()) for one in (out, served)]
    assert manifests[0]["tensors"] == manifests[1]["tensors"]
    one, other = (load_file(folder / "model.safetensors") for folder in (out, served))
    assert all(torch.equal(one[name], other[name]) for name in other)
