"""The vLLM child: its environment, its time limit, and how long it stays."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.config.after_training import Smoke
from tasks.core.errors import StageProcessError
from tasks.rl.rollout.engines import rollout_time_limit
from tasks.serving.vllm import guest, job
from tests.settings import Rollout

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
            jobs = [
                job.Job(
                    str(vllm / "good"), str(vllm / f"{number}"), [[1] * number], 1, 8, rewards=True
                )
            ]
            results = child.run(jobs, Smoke(), log=LOG, log_path=vllm / f"{number}.log")
            assert results[0]["rewards"] == [number]
        jobs = [job.Job(str(vllm / "good"), str(vllm / "other"), [[1]], 1, 8, rewards=True)]
        child.run(jobs, Smoke(threads=1), log=LOG, log_path=vllm / "other.log")
    logs = [(vllm / f"{name}.log").read_text().split("\n") for name in (1, 2, "other")]
    assert logs == [
        ["imported", "engine of good", ""],
        ["engine of good", ""],
        ["imported", "engine of good", ""],  # other threads need another process
    ]
    assert (vllm / "warm.log").read_text() == ""


def test_after_a_crash_the_next_run_starts_another_process(vllm: Path) -> None:
    broken = _job(vllm / "broken", vllm / "first", [1])
    good = _job(vllm / "good", vllm / "second", [1])
    with job.VllmChild() as child:
        with pytest.raises(StageProcessError, match="vLLM ended with status 1") as raised:
            child.run([broken], Smoke(), log=LOG, log_path=vllm / "first.log")
        assert "ValueError: no such model" in raised.value.details
        (result,) = child.run([good], Smoke(), log=LOG, log_path=vllm / "second.log")
    assert result["rewards"] == [1]
    assert (vllm / "second.log").read_text() == "imported\nengine of good\n"


@pytest.mark.parametrize("gpu", [False, True])
def test_workers_on_a_cpu_share_the_cores_and_need_no_numa_nodes(
    monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    monkeypatch.setattr(job, "has_gpu", lambda: gpu)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    alone, shared = job.environment(2, None), job.environment(2, None, sharing=4)
    assert "VLLM_CPU_OMP_THREADS_BIND" not in alone
    assert shared.get("VLLM_CPU_OMP_THREADS_BIND") == (None if gpu else "nobind")
    assert shared.get("OMP_NUM_THREADS") == (None if gpu else "1")
    told = job.environment(2, 3, sharing=4)
    assert (told["OMP_NUM_THREADS"], told["VLLM_CPU_OMP_THREADS_BIND"]) == ("3", "nobind")


@pytest.mark.parametrize(("gpu", "seconds"), [(True, 4_900), (False, 120_900)])
def test_large_weights_get_more_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpu: bool, seconds: int
) -> None:
    """200 GB in sparse files."""
    monkeypatch.setattr(job, "has_gpu", lambda: gpu)
    assert job.time_limit([tmp_path]) == 900
    for name in ("model-1.safetensors", "pytorch_model.bin", "tokenizer.json"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(50_000_000_000)
    assert job.time_limit([tmp_path, tmp_path]) == seconds


@pytest.mark.parametrize(("setting", "seconds"), [(None, 900.0), (7.5, 7.5)])
def test_a_time_limit_that_is_set_wins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: float | None, seconds: float
) -> None:
    given: list[float] = []
    child = SimpleNamespace(ask=lambda _, seconds: given.append(seconds))
    monkeypatch.setattr(
        job.VllmChild, "warm", lambda self, *_, **__: vars(self).update(_child=child)
    )
    monkeypatch.setattr(job.VllmChild, "_end", lambda *_: None)
    jobs = [job.Job(str(tmp_path), str(tmp_path / "out"), [[1]], 1, 8)]
    with pytest.raises(FileNotFoundError):  # nothing has answered
        job.run_vllm(jobs, Smoke(timeout_s=setting), log=LOG, log_path=tmp_path / "log")
    assert given == [pytest.approx(seconds, abs=1)]
    policy: Any = SimpleNamespace(job=SimpleNamespace(base=tmp_path))
    assert rollout_time_limit(Rollout(timeout_s=setting), policy) == seconds


@pytest.mark.slow
def test_an_engine_on_a_gpu_starts_without_nvcc() -> None:
    """vLLM's own rule, on a simulated CUDA platform, in the environment of its child."""
    rule = (
        "from vllm.v1.sample.ops import topk_topp_sampler as ours;"
        "from types import SimpleNamespace as Platform;"
        "ours.current_platform = Platform(is_cuda=lambda: True, get_device_capability=lambda: 1/0);"
        "assert ours.flashinfer_sampler_supported() is False"
    )
    done = subprocess.run(
        [sys.executable, "-c", rule], env={**os.environ, **job.environment(1, None)}, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_vllm_compiles_no_sampler_in_either_kind_of_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert job.environment(1, None)["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    vllm = SimpleNamespace(LLM="LLM")
    core = SimpleNamespace()
    modules = {"vllm": vllm, "vllm.v1.engine": SimpleNamespace(core=core)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    assert guest.engine_class() == "LLM"
    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
