"""The estimated memory of an online run compared with the memory that ranks use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.config.checks.phases import rank_memory
from tasks.training.job import Evaluate, Peft, Zero
from tests.rl.online import job_of, settings_with, started
from tests.settings import Batch, Optim
from tests.training.conftest import make_tokenizer
from tests.training.memory.test_memory import SHAPES, random_model

TWICE = {"critic": "separate", "iterations": 2, "eval_prompts": 2}


@pytest.mark.slow
def test_policy_critic_and_reference_are_within_a_quarter(data: Path, tmp_path: Path) -> None:
    base = random_model(tmp_path / "base", SHAPES["0.1B"], make_tokenizer())
    settings = settings_with(
        data, rl=TWICE, peft=Peft(), zero=Zero(2), dtype="bfloat16", save_steps=0,
        optim=Optim(lr=1e-6, scheduler="constant"), evaluate=Evaluate(best_metric="reward"),
        batch=Batch(micro_batch_size=2, global_batch_size=16, max_len=64),
    )  # fmt: skip
    job = job_of(settings, base, data, tmp_path / "run")
    job.write(job.out / "job.json")
    started("tests.rl.memory_program", tmp_path, str(job.out / "job.json"))
    peak = max(json.loads((job.out / "memory.json").read_text()))
    config = json.loads((base / "config.json").read_text())
    expected = rank_memory(config, settings, gpu=None)
    assert {"critic", "reference"} <= {term.name for term in expected.terms}
    shown = ", ".join(map(str, expected.terms))
    assert 0.75 < expected.total / peak < 1.25, f"found {peak >> 20} MiB, expected {shown}"
