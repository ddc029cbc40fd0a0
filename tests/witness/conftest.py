"""A base of the toy's sizes, trained by a script that knows nothing of Plumbline, and served."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.drift.fingerprint import Drift, Fingerprint, drift
from tests.commands import command, environment, run_in_empty, summary_of
from tests.verify.serving import serve

SCRIPT = Path(__file__).with_name("train_script.py")
PACKAGE = Path(__file__).parents[2] / "tasks" / "witness"


@dataclass(frozen=True)
class Trained:
    """Output folder of a training."""

    out: Path

    def record(self, folder: str = "") -> Path:
        """Return the record in the output folder, or in one of its checkpoints."""
        return self.out / folder / "plumbline.witness"

    def facts(self, folder: str = "") -> dict[str, Any]:
        """Return `witness.json`."""
        loaded: dict[str, Any] = json.loads((self.record(folder) / "witness.json").read_text())
        return loaded

    def fingerprint(self, name: str = "fingerprint", folder: str = "") -> Fingerprint:
        """Return the log-probabilities with the adapter, or those of `base`."""
        return Fingerprint.load(self.record(folder) / f"{name}.fp")


def make_base(folder: Path, seed: int = 5) -> Path:
    """Write a tiny Qwen2 of random weights and the toy's tokenizer."""
    import torch

    from tasks.toy.pretrain import build_model, train_tokenizer
    from tasks.toy.splits import corpus

    texts = [f"{question} {answer}" for question, answer in corpus(200, seed=0)]
    tokenizer = train_tokenizer(texts, context=256)
    torch.manual_seed(seed)
    model = build_model(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny Qwen2 of random weights and the toy's tokenizer."""
    return make_base(tmp_path_factory.mktemp("witness") / "base")


def train(
    base: Path, out: Path, kind: str, sharding: str = "", *, ranks: int = 1, witnessed: bool = True
) -> Trained:
    """Train with the script, as a user does: `python -m plumbline_witness -- ...`."""
    python = [sys.executable, str(SCRIPT)]
    if ranks > 1:
        flags = ["--standalone", "--nproc-per-node", str(ranks)]
        python = [sys.executable, "-m", "torch.distributed.run", *flags, str(SCRIPT)]
    words = [*python, kind, str(base), str(out), *filter(None, [sharding])]
    env = environment(
        PYTHONPATH=str(PACKAGE), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""
    )
    before = [sys.executable, "-m", "plumbline_witness", "--"] if witnessed else []
    done = subprocess.run(
        [*before, *words],
        env=env, capture_output=True, text=True, check=False, cwd=out.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert (out / "done").exists()
    return Trained(out)


def load(base: Path, folder: Path) -> Any:
    """Load a checkpoint in float32, as anybody would."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    whole = not (folder / "adapter_config.json").is_file()
    model = AutoModelForCausalLM.from_pretrained(folder if whole else base, dtype=torch.float32)
    return (model if whole else PeftModel.from_pretrained(model, folder)).eval()


def of_files(model: Any, reference: Fingerprint) -> Drift:
    """Return the drift of a model, one probe at a time, from a recorded fingerprint."""
    import torch

    parts = []
    for probe in reference.probes:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([probe])).logits[0, :-1].float()
        parts.append(torch.log_softmax(logits, -1).numpy())
    whole = np.concatenate(parts)
    logprobs = np.take_along_axis(whole, reference.ids.astype(np.int64), 1)
    new = Fingerprint(reference.probes, reference.ids, logprobs, whole.argmax(1), "files")
    return drift(reference, new)


def deliver(tmp_path: Path, source: Path, *more: str) -> tuple[int, str]:
    """Run `flows/deliver.py` with `out=tmp_path/served`; returns exit status and output."""
    cwd = tmp_path / "elsewhere"
    cwd.mkdir(exist_ok=True)
    out, runs = tmp_path / "served", tmp_path / "runs"
    shutil.rmtree(out, ignore_errors=True)
    argv = command("deliver", f"source={source}", f"out={out}", f"paths.runs={runs}", *more)
    done = run_in_empty(cwd, argv, env=environment(OMP_NUM_THREADS="1"), timeout=580)
    return done.returncode, done.stdout


def assert_delivered(tmp_path: Path, source: Path, *more: str) -> dict[str, float]:
    """Deliver without `merge.base`, which only the record tells; returns the mean KL by stage."""
    status, text = deliver(tmp_path, source, "smoke.engine=transformers", *more)
    assert status == 0, text
    assert "witness: " in text
    stages = {stage["name"]: stage for stage in summary_of(tmp_path / "runs")["stages"]}
    drifts = {name: stages[name]["drift"]["mean_kl"] for name in ("reference", "smoke_eval")}
    assert max(drifts.values()) < 1e-3
    return drifts


def verify(tmp_path: Path, url: str, source: Path, name: str = "", *more: str) -> tuple[int, str]:
    """Run `flows/verify.py`; returns exit status and output."""
    cwd = tmp_path / "elsewhere"
    cwd.mkdir(exist_ok=True)
    named = [f"name={name}"] if name else []
    words = command("verify", f"url={url}", f"source={source}", *named, *more)
    done = run_in_empty(cwd, words, env=environment(), timeout=580)
    return done.returncode, done.stdout


def assert_served(tmp_path: Path, base: Path, adapters: Mapping[str, Path]) -> None:
    """Serve adapters beside their base in one vLLM: each is verified, the first not as the last."""
    with serve(base, adapters, log=tmp_path / "server.log") as server:
        for name, source in adapters.items():
            status, text = verify(tmp_path, server.url, source, name)
            print(f"{name}: {text.splitlines()[-1]}")
            assert status == 0, f"{name}: {text}"
        first, *_, last = adapters
        status, text = verify(tmp_path, server.url, adapters[first], last)
        assert status == 1, f"{last} for {first}: {text}"
