"""How vLLM's child is started."""

from __future__ import annotations

import os

import pytest

from tasks.serving import job


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
