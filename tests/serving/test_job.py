"""The vLLM child: its environment, its time limit, and how long it stays."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tasks.config.after_training import Smoke
from tasks.core.errors import StageProcessError
from tasks.serving.vllm import job

LOG = logging.getLogger("tests.serving")
ENGINE = """
import os
from types import SimpleNamespace as Answer

print("imported")

class LLM:
    def __init__(self, model, **_):
        print("engine of", os.path.basename(model))
        if "broken" in model:
            raise ValueError("no such model")

    def classify(self, inputs, use_tqdm):
        return [Answer(outputs=Answer(probs=[len(each["prompt_token_ids"])])) for each in inputs]
"""
"""A stand-in for vLLM: what is tested here is the process around it."""


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Replace vLLM in child processes; return a folder with two models."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "vllm.py").write_text(ENGINE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    for name in ("good", "broken"):
        (tmp_path / name).mkdir()
    return tmp_path


def _job(model: Path, out: Path, prompt: list[int]) -> job.Job:
    return job.Job(str(model), str(out), [prompt], 1, 8, rewards=True)


def test_vllm_is_imported_once_in_a_block_and_each_run_has_its_log(vllm: Path) -> None:
    with job.VllmChild() as child:
        child.warm(Smoke(), log=LOG, log_path=vllm / "warm.log")
        for number in (1, 2):
            jobs = [_job(vllm / "good", vllm / f"{number}", [1] * number)]
            results = child.run(jobs, Smoke(), log=LOG, log_path=vllm / f"{number}.log")
            assert results[0]["rewards"] == [number]
        jobs = [_job(vllm / "good", vllm / "other", [1])]
        child.run(jobs, Smoke(threads=1), log=LOG, log_path=vllm / "other.log")
    logs = [(vllm / f"{name}.log").read_text().split("\n") for name in (1, 2, "other")]
    assert logs == [
        ["imported", "engine of good", ""],
        ["engine of good", ""],
        ["imported", "engine of good", ""],  # other threads need another process
    ]
    assert (vllm / "warm.log").read_text() == ""


@pytest.mark.slow
def test_after_a_crash_the_next_run_starts_another_process(vllm: Path) -> None:
    broken = _job(vllm / "broken", vllm / "first", [1])
    good = _job(vllm / "good", vllm / "second", [1])
    with job.VllmChild() as child:
        with pytest.raises(StageProcessError, match="vLLM") as raised:
            child.run([broken], Smoke(), log=LOG, log_path=vllm / "first.log")
        assert "ValueError: no such model" in raised.value.details
        (result,) = child.run([good], Smoke(), log=LOG, log_path=vllm / "second.log")
    assert result["rewards"] == [1]
    assert (vllm / "second.log").read_text() == "imported\nengine of good\n"


def test_large_weights_get_more_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """200 GB in sparse files."""
    assert job.time_limit([tmp_path]) == 900
    for name in ("model-1.safetensors", "pytorch_model.bin", "tokenizer.json"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(50_000_000_000)
    for gpu, seconds in ((True, 4_900), (False, 120_900)):
        monkeypatch.setattr(job, "has_gpu", lambda gpu=gpu: gpu)
        assert job.time_limit([tmp_path, tmp_path]) == seconds
