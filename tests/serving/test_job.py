"""How vLLM's child is started."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks import vllm_jobs
from tasks.deliver.engine import EngineSettings
from tasks.rl.rollout import seconds_for
from tasks.serving import job
from tests.settings import Rollout


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
    """200 GB in all, files without a byte on the disk."""
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
    asked: dict[str, Any] = {}
    monkeypatch.setattr(vllm_jobs, "launch", lambda *_, **how: asked.update(how))
    how = EngineSettings(timeout_s=setting)
    with pytest.raises(FileNotFoundError):  # nothing has answered
        vllm_jobs.run_vllm(
            [job.Job(str(tmp_path), str(tmp_path / "out"), [[1]], 1, 8)], how,
            log=logging.getLogger("test"), log_path=tmp_path / "log",
        )  # fmt: skip
    assert asked["timeout_s"] == seconds
    policy: Any = SimpleNamespace(job=SimpleNamespace(base=tmp_path))
    assert seconds_for(Rollout(timeout_s=setting), policy) == seconds
