"""Jobs of the vLLM child: their fields, and the child's start, environment and time limit.

with VllmChild() as child:          # one import of vLLM for all jobs of the block
    child.run(jobs, settings, log=log, log_path=path)
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from tasks.config.sections import Smoke
from tasks.core.machine import has_gpu
from tasks.process.launch import Conversation, python_child
from tasks.process.output import Log
from tasks.serving.prompts import Chat

STAGE = "smoke_eval"
HEADROOM = 8
"""Tokens added to the longest sequence for `max_model_len`, if the user did not set it."""
LEAST_S = 900.0
"""Time limit of small models, in seconds."""
GPU_S, CPU_S = 20.0, 600.0
"""Further seconds per GB of weights. Loading: 50 MB/s from storage. On a CPU also some thousand
tokens, each of which reads all weights from memory (10 GB/s).
"""
FLASHINFER_SAMPLER = os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0")
"""vLLM 0.32 compiles FlashInfer's top-p sampler with nvcc when an engine starts
(`gpu_model_runner.py`, `_dummy_sampler_run`). Our requests have a seed or no top-p and top-k, and
such requests never use it.
"""

JOB, RESULT = "job.json", "result.json"
"""Files in a job's output folder."""
CALLS = "calls.safetensors"
"""File of recorded module calls: tensors named `<probe>/<module>/<in or out>`."""


@dataclass(frozen=True)
class Job:
    """One job of the vLLM child."""

    served: str  # folder to load
    out: str  # folder for `result.json` and `fingerprint.fp`
    prompts: list[list[int]]  # token ids to continue greedily
    max_new_tokens: int  # token limit of each response
    max_model_len: int  # maximum tokens of prompt and response together
    reference: str | None = None  # fingerprint file with the probes and token ids to score, or None
    # conversations of `prompts`, to check that vLLM renders them to the same ids
    chats: list[Chat] | None = None
    # additional ids to stop at. Normally the served model has them all
    stop: list[int] | None = None
    dtype: str = "bfloat16"  # torch dtype name
    seed: int = 0  # of the engine; greedy decoding does not use it
    rewards: bool = False  # True for a reward model: one score per prompt, no responses
    # number of processes that share the model, each with its own accelerator
    tensor_parallel: int = 1
    # also sample each prompt once at this temperature; None: greedy only
    temperature: float | None = None
    calls: bool = False  # True to record the module calls of each prompt instead (`module_calls`)


def environment(kv_cache_gib: int, threads: int | None, *, sharing: int = 1) -> dict[str, str]:
    """Return the environment variables that the child needs before its first import.

    `threads`: of a CPU engine; None for vLLM's own choice. `sharing`: processes that share the
    model. On a CPU vLLM would give each a NUMA node of its own, and fail to start if the machine
    has fewer.
    """
    if sharing > 1 and threads is None and not has_gpu():
        threads = max(1, len(os.sched_getaffinity(0)) // sharing)
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine in this process: no second import
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # workers must not fork a process with torch
        "VLLM_USE_FLASHINFER_SAMPLER": FLASHINFER_SAMPLER,
        "HUMMING_DISABLE_PARALLEL_BUILD": "1",  # a library of vLLM compiles what is never used
    }
    if threads is not None:
        env |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return env


def time_limit(models: Iterable[Path]) -> float:
    """Return the default time limit, in seconds, to load these models and run their jobs."""
    files = (file for model in models for file in model.iterdir())
    size = sum(file.stat().st_size for file in files if file.suffix in (".safetensors", ".bin"))
    return LEAST_S + size / 1e9 * (GPU_S if has_gpu() else CPU_S)


class VllmChild:
    """One vLLM child process, which runs each job in an engine of its own; a context manager.

    Within its block the process stays, so that vLLM is imported once. Outside of a block `run`
    starts a process and ends it. Settings that change the process's environment start another one.
    """

    def __init__(self) -> None:
        self._stays = False
        self._child: Conversation | None = None
        self._env: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._stays = True
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._stays = False
        self._end(error)

    def warm(self, settings: Smoke, *, log: Log, log_path: Path) -> None:
        """Start the process without waiting, so that its imports overlap with other work."""
        sharing = settings.tensor_parallel
        env = environment(settings.kv_cache_gib, settings.threads, sharing=sharing)
        if self._child is not None and self._env == env and self._child.is_running:
            self._child.log_to(log, log_path)
            return
        self._end()
        argv = python_child("tasks.serving.vllm.child")
        child = Conversation(argv, stage=STAGE, log=log, log_path=log_path, env=env)
        self._child, self._env = child.__enter__(), env

    def run(
        self, jobs: Sequence[Job], settings: Smoke, *, log: Log, log_path: Path
    ) -> list[dict[str, Any]]:
        """Run the jobs one after the other; return the `result.json` of each.

        The output folder of each must not exist yet; it gets the fingerprint, too. Without
        `smoke.timeout_s` the size of all weights limits the time. Raises StageProcessError.
        """
        seconds = settings.timeout_s or time_limit(Path(job.served) for job in jobs)
        until = time.monotonic() + seconds
        results = []
        try:
            for job in jobs:
                folder = Path(job.out)
                folder.mkdir(parents=True)
                (folder / JOB).write_text(json.dumps(asdict(job)))
                self.warm(settings, log=log, log_path=log_path)
                assert self._child is not None
                self._child.ask({"job": str(folder / JOB)}, max(0.0, until - time.monotonic()))
                results.append(json.loads((folder / RESULT).read_text()))
        except BaseException as error:
            self._end(error)
            raise
        if not self._stays:
            self._end()
        return results

    def _end(self, error: BaseException | None = None) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.__exit__(None if error is None else type(error), error, None)
