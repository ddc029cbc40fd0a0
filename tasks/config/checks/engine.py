"""Memory of the engines that serve a model: weights and KV cache.

`smoke_eval` starts vLLM on the served folder and then on the base, one at a time. On a CPU the KV
cache has a configured size; on a GPU it is the rest of vLLM's share beside the weights. It has to
hold the longest sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.config.after_training import engine_dtype
from tasks.core.finding import Finding
from tasks.training.memory.estimate import ITEM, LIBRARIES
from tasks.training.memory.sizes import Sizes

GIB = 2**30
AT_ONCE = 64
"""Sequences that smoke_eval lets vLLM run at once (`max_num_seqs`)."""
HEADROOM = 8
"""Tokens beyond the longest sequence, as `tasks/serving/vllm/job.py` adds them."""
BLOCK = {"cpu": 128, "gpu": 16}
"""Tokens of a KV cache block in vLLM 0.32."""
GPU_SHARE = 0.92
"""Share of a GPU's memory that vLLM 0.32 takes (`gpu_memory_utilization`)."""


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one engine, or of each process if several share a model.

    Attributes:
        weights: bytes, in the served format.
        cache: bytes of the KV cache.
        token: bytes of one token's keys and values.
        context: tokens of the longest sequence.
        block: tokens of a cache block.
        at_once: limit of sequences that run at once.
    """

    weights: int
    cache: int
    token: int
    context: int
    block: int
    at_once: int = AT_ONCE

    @property
    def total(self) -> int:
        """Bytes without libraries."""
        return self.weights + self.cache

    @property
    def longest(self) -> int:
        """Bytes of the keys and values of one sequence of `context` tokens."""
        return -(-self.context // self.block) * self.block * self.token

    @property
    def together(self) -> int:
        """Number of sequences of `context` tokens that fit at once."""
        return int(self.cache // self.longest)

    def __str__(self) -> str:
        together = min(self.together, self.at_once)
        running = f"{together} of {self.at_once} sequences of {self.context} tokens"
        return (
            f"{self.total / 2**20:.1f} MiB (weights {self.weights / 2**20:.1f} MiB, "
            f"KV cache {self.cache / 2**20:.1f} MiB: {self.token / 2**10:.1f} KiB a token, "
            f"room for {running})"
        )


def engine_memory(
    config: Mapping[str, Any], settings: Mapping[str, Any], *, gpu_bytes: int | None
) -> EngineMemory:
    """Return the memory of smoke_eval's engine, per `smoke.tensor_parallel` process.

    Args:
        config: contents of the base's `config.json`.
        settings: the resolved configuration.
        gpu_bytes: the GPU's memory; None for a CPU.

    Raises:
        KeyError: an architecture that names its dimensions differently.
    """
    sizes, smoke = Sizes.of(config), settings["smoke"]
    item = ITEM[engine_dtype(settings)]
    shared = smoke["tensor_parallel"] if smoke["engine"] != "transformers" else 1
    weights = sizes.weights() * item
    weights //= shared
    token, context = _token(sizes, item, shared), _context(config, settings)
    block = BLOCK["cpu" if gpu_bytes is None else "gpu"]
    if smoke["engine"] == "transformers":
        cache, block = context * token, 1  # transformers takes one prompt at a time
    elif gpu_bytes is None:
        cache = smoke["kv_cache_gib"] * GIB
    else:
        cache = max(0, int(GPU_SHARE * gpu_bytes) - weights - LIBRARIES)
    return EngineMemory(weights, cache, token, context, block)


def rollout_memory(
    config: Mapping[str, Any], settings: Mapping[str, Any], *, gpu_bytes: int | None
) -> EngineMemory:
    """Return the memory of vLLM beside each rank of an online run.

    On a GPU the engine frees its memory while ranks train.
    Arguments and errors are those of `engine_memory`.
    """
    sizes, rollout = Sizes.of(config), settings["rollout"]
    item, shared = ITEM[settings["model"]["dtype"]], rollout["tensor_parallel"]
    weights = sizes.weights() * item
    if gpu_bytes is None:
        cache = int(rollout["kv_cache_gib"] * GIB)
    else:
        cache = max(0, int(rollout["gpu_memory"] * gpu_bytes) - weights // shared - LIBRARIES)
    context = rollout["max_prompt_len"] + rollout["max_new_tokens"]
    block = BLOCK["cpu" if gpu_bytes is None else "gpu"]
    token = _token(sizes, item, shared)
    return EngineMemory(weights // shared, cache, token, context, block, rollout["max_num_seqs"])


def _token(sizes: Sizes, item: int, shared: int) -> int:
    """Return the bytes of a token's keys and values in each process that shares a model.

    Each process has at least one whole head: heads are repeated if there are fewer of them than
    processes (vLLM 0.32, `ModelConfig.get_num_kv_heads`).
    """
    heads = max(1, sizes.kv_heads // shared)
    return sizes.kv_cache(1, item) // sizes.kv_heads * heads


def _context(config: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    """Return the tokens of the longest sequence: as set, or an estimate of prompt and response."""
    smoke = settings["smoke"]
    text = config.get("text_config") or config
    needed = settings["train"]["max_len"] + smoke["max_new_tokens"] + HEADROOM
    return int(smoke["max_model_len"] or min(needed, text.get("max_position_embeddings", needed)))


def heads_of(config: Mapping[str, Any]) -> int:
    """Return the number of attention heads; 0 if config.json does not have it."""
    return int((config.get("text_config") or config).get("num_attention_heads") or 0)


_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def shareable(
    key: str, processes: int, config: Mapping[str, Any], *, gpus: int | None = None
) -> list[Finding]:
    """Check that processes can share a model (vLLM 0.32, `verify_with_parallel_config`).

    Args:
        key: the setting with the number of processes.
        processes: its value.
        config: contents of `config.json`.
        gpus: number of visible GPUs, if each process needs one of its own.
    """
    if gpus and processes > gpus:
        allowed = f"a GPU for each process, and {gpus} {'is' if gpus == 1 else 'are'} visible"
        return [Finding(key, str(processes), allowed, f"{key}={gpus}")]
    if processes < 1 or divides(config, processes):
        return []
    fits = max(count for count in range(1, processes) if divides(config, count))
    allowed = "a number by which vLLM can divide the model's attention heads and its widths"
    return [Finding(key, str(processes), allowed, f"{key}={fits}")]


def divides(config: Mapping[str, Any], processes: int) -> bool:
    """Return True if vLLM can divide heads, key heads and feed-forward width by a number."""
    text = config.get("text_config") or config
    heads = heads_of(config)
    keys = int(text.get("num_key_value_heads") or heads)
    widths = [int(text.get(name) or 0) for name in _WIDTHS]
    shared = keys % processes == 0 or (keys > 0 and processes % keys == 0)
    return shared and not any(size % processes for size in (heads, *widths))


def cache_fits(engine: EngineMemory, *, on_gpu: bool, more: int = 1) -> list[Finding]:
    """Check that the KV cache holds one sequence of full length, which vLLM needs to start.

    Args:
        engine: its memory.
        on_gpu: True if it runs on a GPU.
        more: number of GPUs that could share the model.
    """
    if engine.longest <= engine.cache:
        return []
    holds = engine.cache // (engine.block * engine.token) * engine.block
    shorter = f"smoke.max_model_len={holds}" if holds else "a smaller model"
    if on_gpu and more > 1:
        shorter = f"smoke.tensor_parallel={more}" + (f" or {shorter}" if holds else "")
    if on_gpu:
        what, override = "GPU memory of smoke_eval", shorter
    else:
        what = "smoke.kv_cache_gib"
        override = f"smoke.kv_cache_gib={-(-engine.longest // GIB)} or {shorter}"
    value = f"{engine.cache / GIB:.1f} GiB for keys and values, room for {holds} tokens"
    allowed = (
        f"vLLM needs room for one sequence of {engine.context} tokens, "
        f"{engine.longest / GIB:.1f} GiB ({engine.token / 2**10:.0f} KiB a token)"
    )
    return [Finding(what, value, allowed, override)]


def rollouts_fit(engine: EngineMemory, gpu_bytes: int | None) -> list[Finding]:
    """Check that the KV cache of the rollout engine holds one sequence of full length.

    Args:
        engine: as `rollout_memory` returns it.
        gpu_bytes: the GPU's memory; None for a CPU.
    """
    missing = engine.longest - engine.cache
    if missing <= 0:
        return []
    if gpu_bytes is None:
        key, override = "rollout.kv_cache_gib", f"{-(-engine.longest // GIB)}"
    else:
        used = engine.weights + engine.longest + LIBRARIES
        key, override = "rollout.gpu_memory", f"{math.ceil(100 * used / gpu_bytes) / 100:g}"
    available = f"{engine.cache / GIB:.1f} GiB for keys and values"
    allowed = (
        f"vLLM needs room for one sequence of {engine.context} tokens, "
        f"{engine.longest / GIB:.1f} GiB, beside {engine.weights / GIB:.1f} GiB of weights"
    )
    return [Finding(key, available, allowed, f"{key}={override}")]


def host_fits(
    engine: EngineMemory, available: int, kv_cache_gib: int, processes: int = 1
) -> list[Finding]:
    """Check that the host holds weights, cache and libraries of all processes of an engine.

    Args:
        engine: memory of one process.
        available: bytes of the host.
        kv_cache_gib: `smoke.kv_cache_gib`.
        processes: number of processes.
    """
    needed = processes * (engine.total + LIBRARIES)
    if needed <= available:
        return []
    spare = (available // processes - engine.weights - LIBRARIES) // GIB
    override = "a machine with more memory"
    if 1 <= spare < kv_cache_gib:
        override = f"smoke.kv_cache_gib={spare} or smoke.engine=transformers"
    value = f"{available / GIB:.1f} GiB available"
    allowed = f"smoke_eval needs about {needed / GIB:.1f} GiB: {engine}"
    return [Finding("memory of smoke_eval", value, allowed, override)]
