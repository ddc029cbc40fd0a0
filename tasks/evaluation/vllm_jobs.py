"""Run jobs in a child process of vLLM. Nothing else starts vLLM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.config.after_training import Smoke
from tasks.process.launch import PORT_TAKEN, launch, python_child
from tasks.process.output import Log
from tasks.serving.vllm.job import Job, environment, time_limit

STAGE = "smoke_eval"
HEADROOM = 8
"""Tokens added to the longest sequence for `max_model_len`, if the user did not set it."""


def run_vllm(
    jobs: Sequence[Job], settings: Smoke, *, log: Log, log_path: Path
) -> list[dict[str, Any]]:
    """Run the jobs in one child process of vLLM, each in its own engine.

    Args:
        jobs: the jobs; the output folder of each must not exist yet.
        settings: section `smoke` of the configuration; without a time limit, the size of all
            weights decides it.
        log: gets the engine's output.
        log_path: file for the engine's whole output.

    Returns:
        The `result.json` of each job. If a job takes a fingerprint, it is in the job's folder.

    Raises:
        StageProcessError: vLLM did not start or crashed.
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
        env=environment(settings.kv_cache_gib, settings.threads, sharing=sharing),
        timeout_s=settings.timeout_s or time_limit(Path(job.served) for job in jobs),
        transient=PORT_TAKEN,
    )
    return [json.loads((Path(job.out) / "result.json").read_text()) for job in jobs]
