"""vLLM as a child process that does jobs: the one place that starts it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tasks.process.launch import launch, python_child
from tasks.process.output import Log
from tasks.serving.vllm.job import Job, environment, time_limit

STAGE = "smoke_eval"
HEADROOM = 8
"""Tokens that `max_model_len` has beyond the longest sequence, when we choose it."""


class Engine(Protocol):
    """How vLLM is run."""

    @property
    def kv_cache_gib(self) -> int: ...
    @property
    def threads(self) -> int | None: ...
    @property
    def timeout_s(self) -> float | None: ...


def run_vllm(
    jobs: Sequence[Job], engine: Engine, *, log: Log, log_path: Path
) -> list[dict[str, Any]]:
    """Do the jobs in one child process of vLLM, each in an engine of its own.

    Args:
        jobs: each with a folder of its own to leave things in, which is made here.
        engine: how it is run; without a time limit the weights of all jobs decide it.
        log: gets the engine's output.
        log_path: file for all of it.

    Returns:
        `result.json` of each; a fingerprint that a job asked for is in the job's folder.

    Raises:
        StageProcessError: vLLM did not come up or broke down.
    """
    paths, sharing = [], max(job.tensor_parallel for job in jobs)
    for job in jobs:
        Path(job.out).mkdir(parents=True)
        paths.append(Path(job.out) / "job.json")
        job.save(paths[-1])
    launch(
        python_child("tasks.serving.vllm.child", *map(str, paths)),
        stage=STAGE,
        log=log,
        log_path=log_path,
        env=environment(engine.kv_cache_gib, engine.threads, sharing=sharing),
        timeout_s=engine.timeout_s or time_limit(Path(job.served) for job in jobs),
    )
    return [json.loads((Path(job.out) / "result.json").read_text()) for job in jobs]
