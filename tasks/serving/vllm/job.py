"""The vLLM child's job, the environment it has to be started in, and how long it may take."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tasks.core.machine import has_gpu

LEAST_S = 900.0
"""Time limit of small models."""
GPU_S, CPU_S = 20.0, 600.0
"""Seconds more for each GB of weights: storage of 50 MB/s, and on a CPU some thousand tokens one by
one, each of which reads all weights from memory (10 GB/s)."""
FLASHINFER_SAMPLER = os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0")
"""vLLM 0.32 tries FlashInfer's top-p sampler when an engine starts, and that compiles it with nvcc
(`gpu_model_runner.py`, `_dummy_sampler_run`). Requests with a seed, or without a cut, never use it,
and ours are of these two kinds."""


@dataclass(frozen=True)
class Job:
    """What to do.

    Attributes:
        served: folder to load.
        out: folder for `result.json` and `fingerprint.fp`.
        prompts: token ids to continue greedily.
        max_new_tokens: limit for each.
        max_model_len: longest sequence, prompt and answer together.
        reference: fingerprint file whose probes and ids are scored; None to leave that out.
        messages: the conversations of `prompts`, to see that vLLM renders them to the same ids.
        stop: extra ids to stop at. The served model itself has to know when to stop.
        dtype: torch dtype name.
        seed: seed of the engine (greedy decoding does not use it).
        rewards: a reward model: one number for each prompt, and nothing is continued.
        tensor_parallel: processes that share the model, each on an accelerator of its own.
        temperature: continue the prompts once more, with draws at this temperature; None: greedily
            alone.
    """

    served: str
    out: str
    prompts: list[list[int]]
    max_new_tokens: int
    max_model_len: int
    reference: str | None = None
    messages: list[list[dict[str, str]]] | None = None
    stop: list[int] | None = None
    dtype: str = "bfloat16"
    seed: int = 0
    rewards: bool = False
    tensor_parallel: int = 1
    temperature: float | None = None

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Job:
        """Read what `save` wrote."""
        return cls(**json.loads(path.read_text()))


def environment(kv_cache_gib: int, threads: int | None, *, sharing: int = 1) -> dict[str, str]:
    """Environment variables the child needs before its first import.

    Args:
        kv_cache_gib: for keys and values, on a CPU.
        threads: of a CPU engine; None for vLLM's own choice.
        sharing: processes that share the model. On a CPU vLLM would give each a NUMA node of its
            own, and start on no machine that has fewer.
    """
    if sharing > 1 and threads is None and not has_gpu():
        threads = max(1, len(os.sched_getaffinity(0)) // sharing)
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this very process: no second import
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # its workers: we are a fork with torch in it
        "VLLM_USE_FLASHINFER_SAMPLER": FLASHINFER_SAMPLER,
    }
    if threads is not None:
        env |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return env


def time_limit(models: Iterable[Path]) -> float:
    """Return the seconds that engines may take to load these models and answer, if nobody says.

    Args:
        models: folders; one that is loaded twice counts twice.
    """
    files = (file for model in models for file in model.iterdir())
    size = sum(one.stat().st_size for one in files if one.suffix in (".safetensors", ".bin"))
    return LEAST_S + size / 1e9 * (GPU_S if has_gpu() else CPU_S)
