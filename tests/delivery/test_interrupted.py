"""An interrupted delivery leaves nothing at OUT, has the right status, and can be resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tasks.core.private import UMASK, stay_private
from tasks.delivery.folders import put
from tasks.pipeline.artifact import Artifact, Origin, open_artifact, publish, staging, verify
from tests.commands import command
from tests.delivery.conftest import one_thread
from tests.killing import kills
from tests.tiny import save_tokenizer

HIDDEN, ROWS = 1024, 300


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of 75 MB, large enough for an interruption."""
    from transformers import Qwen2Config

    folder = tmp_path_factory.mktemp("large") / "model"
    config = Qwen2Config(
        vocab_size=ROWS, hidden_size=HIDDEN, intermediate_size=4096, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    save_tokenizer(folder)
    from tasks.weights.model import model_facts

    wanted = model_facts(folder).tensors
    state = {tensor.name: torch.ones(tensor.shape, dtype=torch.bfloat16) for tensor in wanted}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_nothing_is_visible_at_out(large, tmp_path) -> None:
    out, runs = tmp_path / "out", tmp_path / "runs"
    words = command(
        "deliver", f"source={large}", f"out={out}", f"paths.runs={runs}", "smoke.engine=none",
        "convert.dtype=float32",
    )  # fmt: skip
    process = subprocess.Popen(
        words, env=one_thread(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + 60
    while not list(runs.glob("artifacts/served/.*.tmp/model*.safetensors")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, output
    assert not out.exists()
    assert not list(tmp_path.glob(".out*"))
    again = subprocess.run(words, env=one_thread(), capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    assert (out / "manifest.json").is_file()
    assert not list(runs.glob("artifacts/served/.*.tmp"))
    # Weights at OUT are links of the artifact; its folder is private.
    records = [p for p in (runs / "artifacts").rglob("*") if p.suffix != ".safetensors"]
    records = [p for p in records if not p.is_symlink()]
    assert [p for p in records if p.stat().st_mode & 0o077] == []


def test_killed_at_any_change_of_the_disk_out_is_the_old_delivery_or_the_new(tmp_path) -> None:
    out, visible = tmp_path / "there" / "out", set()
    stay_private()  # as every command

    def served(name: str) -> Artifact:
        with staging(tmp_path / name) as work:
            save_file({"w": torch.full((2,), len(name))}, work / "model.safetensors")
            (work / "config.json").write_text(name)
            return publish(work, tmp_path / name, Origin("served", "convert", name))

    old, new = served("old"), served("newer")
    put(old, out, "# Card")
    for _ in kills(lambda: put(new, out, "# Card")):
        if out.exists():
            artifact = open_artifact(out)
            assert verify(artifact) == []
            visible.add(artifact.digest)
        put(new, out, "# Card")
        assert verify(open_artifact(out)) == []
        put(old, out, "# Card")
        assert list(out.parent.iterdir()) == [out]
    assert visible == {old.digest, new.digest}
    mode = 0o666 & ~int(os.environ[UMASK], 8)  # other users may serve it
    assert (out / "manifest.json").stat().st_mode & 0o777 == mode
    assert (new.path / "manifest.json").stat().st_mode & 0o077 == 0
