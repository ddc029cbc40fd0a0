"""Memory of a rank, of the engines beside it, and of the engine that serves the model afterwards.

A rank's memory is the peak over the phases of an iteration:

    generate   the engine samples: its weights and KV cache, beside the trainer's resident states
    score      policy, reference, critic and reward model score the responses, without gradients
    train      passes and optimizer steps of policy and critic, one model after the other

A run that does not learn from its own responses has the last phase alone. On a CPU the engine's
memory stays; on a GPU it sleeps while ranks score and train.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tasks.config.after_training import engine_dtype
from tasks.config.checks.context import Context
from tasks.config.checks.model import look_at
from tasks.config.defaults import ONLINE
from tasks.core import machine
from tasks.core.finding import Finding
from tasks.rl.algorithms import ALGORITHMS
from tasks.rl.reward_model import ROW_TOKENS
from tasks.rl.rollout.engine import goes_as_adapter
from tasks.rl.settings import Online
from tasks.training.engine.failure import smaller
from tasks.training.job import Batch, Settings
from tasks.training.memory.estimate import (
    ITEM,
    LIBRARIES,
    MemoryEstimate,
    adapter_weights,
    estimate,
    on_node,
    row_bytes,
)
from tasks.training.memory.sizes import Sizes
from tasks.weights.files.documents import read_json

GIB = 2**30
ASLEEP = GIB
"""GPU memory of a sleeping engine: CUDA graphs and workspaces. An estimate, not measured: vLLM only
frees weights and cache (`vllm/device_allocator/cumem.py`)."""
HEADROOM = 8
"""Tokens beyond the longest sequence, as `tasks/serving/vllm/job.py` adds them."""
BLOCK = {"cpu": 128, "gpu": 16}
"""Tokens of a KV cache block in vLLM 0.32."""
GPU_SHARE = 0.92
"""Share of a GPU's memory that vLLM 0.32 takes (`gpu_memory_utilization`)."""
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank, in bytes.

    Attributes:
        peaks: peak of each phase.
        least: peak of each phase with the shortest samples.
        host: bytes of states offloaded from a GPU; not included above.
        mapped: part of a CPU rank's weights that the ranks of a node share.
    """

    peaks: Mapping[str, int]
    least: Mapping[str, int]
    host: int = 0
    mapped: int = 0

    @property
    def total(self) -> int:
        """The peak over all phases."""
        return max(self.peaks.values())

    @property
    def states(self) -> int:
        """The peak over all phases with the shortest samples."""
        return max(self.least.values())

    def __str__(self) -> str:
        each = ", ".join(f"{name} {in_words(size)}" for name, size in self.peaks.items())
        phases = f" ({each})" if len(self.peaks) > 1 else ""
        return f"{in_words(self.total)} at its peak{phases}"


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one engine, or of each process if several share a model.

    Attributes:
        weights: bytes, in the served format.
        cache: bytes of the KV cache.
        token: bytes of one token's keys and values.
        context: tokens of the longest sequence.
        block: tokens of a cache block.
    """

    weights: int
    cache: int
    token: int
    context: int
    block: int

    @property
    def total(self) -> int:
        """Bytes without libraries."""
        return self.weights + self.cache

    @property
    def longest(self) -> int:
        """Bytes of the keys and values of one sequence of `context` tokens."""
        return -(-self.context // self.block) * self.block * self.token

    def __str__(self) -> str:
        together = self.cache // self.longest
        return (
            f"{in_words(self.total)} (weights {in_words(self.weights)}, KV cache "
            f"{in_words(self.cache)}: {together} sequences of {self.context} tokens)"
        )


def in_words(size: int) -> str:
    """Return a size with its unit, such as 14.2 GiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


def problems(context: Context) -> Iterator[Finding]:
    """Yield what does not fit into the memory of this machine."""
    rank, settings = context.rank, context.settings
    train, parameters = settings["train"], context.known.parameters or 0
    free, gpu = machine.available_memory(), machine.gpu_memory(train["device"])
    less = " or ".join(smaller(training_settings(settings)))
    mapped = rank.mapped if rank else 2 * parameters
    states, total = (rank.states, rank.total) if rank else (mapped, mapped)
    if gpu is None:
        needs = [on_node(size, mapped, train["nproc"]) for size in (states, total)]
        yield from fits("memory", free, needs[0], needs[1], less)
    elif rank is not None:
        yield from fits("GPU memory", gpu, states + LIBRARIES, total + LIBRARIES, less)
        host = on_node(rank.host, 0, train["nproc"])
        offloaded = "zero.offload_optimizer=none or rollout.offload_trainer=false"
        yield from fits("memory", free, host, host, offloaded)
    if rank is not None:
        yield from _engines(context, free, gpu)


def fits(what: str, available: int, states: int, total: int, less: str) -> Iterator[Finding]:
    """Compare memory with what is available, in bytes.

    Args:
        available: free memory, without swap.
        states: libraries, weights, gradients, optimizer: always needed.
        total: upper bound, if every sample is `train.max_len` long; a lack of that is a warning.
    """
    value = f"{available / GIB:.1f} GiB available"
    if available < states:
        yield Finding(what, value, f"needs about {states / GIB:.1f} GiB", less)
    elif available < total:
        allowed = f"up to {total / GIB:.1f} GiB with the longest samples"
        yield Finding(what, value, allowed, less, "warning")


def _engines(context: Context, free: int, gpu: int | None) -> Iterator[Finding]:
    """Check the memory of the engines: of rollouts, and of smoke_eval after training."""
    settings, config = context.settings, context.known.config
    rollout, smoke = settings["rollout"], settings["smoke"]
    if context.online and not rollout["urls"]:
        engine = rollout_memory(config, settings, gpu_bytes=gpu)
        if gpu is None:
            key, size = "rollout.kv_cache_gib", f"{-(-engine.longest // GIB)}"
        else:
            used = engine.weights + engine.longest + LIBRARIES
            key, size = "rollout.gpu_memory", f"{math.ceil(100 * used / gpu) / 100:g}"
        yield from cache_fits(engine, key, f"{key}={size}")
    gpu = machine.gpu_memory()
    gpus = machine.gpu_count() if gpu is not None else None
    sharing = smoke["tensor_parallel"] if smoke["engine"] != "transformers" else 1
    if wrong := list(shareable("smoke.tensor_parallel", sharing, config, gpus=gpus)):
        yield from wrong
        return
    engine = engine_memory(config, settings, gpu_bytes=gpu)
    if gpu is not None and gpus is not None:
        more = max(n for n in range(1, gpus + 1) if divides(config, n))
        override = f"smoke.tensor_parallel={more} or smoke.max_model_len=<tokens>"
        yield from cache_fits(engine, "GPU memory of smoke_eval", override)
        return
    override = f"smoke.kv_cache_gib={-(-engine.longest // GIB)} or smoke.max_model_len=<tokens>"
    yield from cache_fits(engine, "smoke.kv_cache_gib", override)
    needed = sharing * (engine.total + LIBRARIES)
    less = "smoke.kv_cache_gib=1 or smoke.engine=transformers"
    yield from fits("memory of smoke_eval", free, needed, needed, less)


def cache_fits(engine: EngineMemory, key: str, override: str) -> Iterator[Finding]:
    """Check that the KV cache holds one sequence of full length, which vLLM needs to start."""
    if engine.longest > engine.cache:
        value = f"{engine.cache / GIB:.1f} GiB for keys and values"
        allowed = (
            f"vLLM needs room for one sequence of {engine.context} tokens, "
            f"{engine.longest / GIB:.1f} GiB"
        )
        yield Finding(key, value, allowed, override)


def shareable(
    key: str, processes: int, config: Mapping[str, Any], *, gpus: int | None = None
) -> Iterator[Finding]:
    """Check that processes can share a model (vLLM 0.32, `verify_with_parallel_config`).

    Args:
        config: contents of `config.json`.
        gpus: number of visible GPUs, if each process needs one of its own.
    """
    if gpus and processes > gpus:
        allowed = f"a GPU for each process, and {gpus} {'is' if gpus == 1 else 'are'} visible"
        yield Finding(key, str(processes), allowed, f"{key}={gpus}")
    elif processes > 1 and not divides(config, processes):
        most = max(count for count in range(1, processes) if divides(config, count))
        allowed = "a number by which vLLM can divide the model's attention heads and its widths"
        yield Finding(key, str(processes), allowed, f"{key}={most}")


def divides(config: Mapping[str, Any], processes: int) -> bool:
    """Return True if vLLM can divide heads, key heads and feed-forward width by a number."""
    text = config.get("text_config") or config
    heads = int(text.get("num_attention_heads") or 0)
    keys = int(text.get("num_key_value_heads") or heads)
    widths = [int(text.get(name) or 0) for name in _WIDTHS]
    shared = keys % processes == 0 or (keys > 0 and processes % keys == 0)
    return shared and not any(size % processes for size in (heads, *widths))


def engine_memory(
    config: Mapping[str, Any], settings: Mapping[str, Any], *, gpu_bytes: int | None
) -> EngineMemory:
    """Return the memory of smoke_eval's engine, per `smoke.tensor_parallel` process.

    Args:
        config: contents of the base's `config.json`.
        gpu_bytes: the GPU's memory; None for a CPU.

    Raises:
        KeyError: an architecture that names its dimensions differently.
    """
    sizes, smoke = Sizes.of(config), settings["smoke"]
    item = ITEM[engine_dtype(settings)]
    shared = smoke["tensor_parallel"] if smoke["engine"] != "transformers" else 1
    weights, token = sizes.weights() * item // shared, _token(sizes, item, shared)
    text = config.get("text_config") or config
    needed = settings["train"]["max_len"] + smoke["max_new_tokens"] + HEADROOM
    context = smoke["max_model_len"] or min(needed, text.get("max_position_embeddings", needed))
    block = BLOCK["cpu" if gpu_bytes is None else "gpu"]
    if smoke["engine"] == "transformers":
        cache, block = context * token, 1  # transformers takes one prompt at a time
    elif gpu_bytes is None:
        cache = smoke["kv_cache_gib"] * GIB
    else:
        cache = max(0, int(GPU_SHARE * gpu_bytes) - weights - LIBRARIES)
    return EngineMemory(weights, cache, token, int(context), block)


def rollout_memory(
    config: Mapping[str, Any], settings: Mapping[str, Any], *, gpu_bytes: int | None
) -> EngineMemory:
    """Return the memory of vLLM beside each rank of an online run; see `engine_memory`.

    On a GPU the engine frees its memory while ranks train.
    """
    sizes, rollout = Sizes.of(config), settings["rollout"]
    item, shared = ITEM[settings["model"]["dtype"]], rollout["tensor_parallel"]
    weights = sizes.weights() * item // shared
    if gpu_bytes is None:
        cache = int(rollout["kv_cache_gib"] * GIB)
    else:
        cache = max(0, int(rollout["gpu_memory"] * gpu_bytes) - weights - LIBRARIES)
    context = rollout["max_prompt_len"] + rollout["max_new_tokens"]
    block = BLOCK["cpu" if gpu_bytes is None else "gpu"]
    return EngineMemory(weights, cache, _token(sizes, item, shared), context, block)


def _token(sizes: Sizes, item: int, shared: int) -> int:
    """Return the bytes of a token's keys and values in each process that shares a model.

    Each process has at least one whole head: heads are repeated if there are fewer of them than
    processes (vLLM 0.32, `ModelConfig.get_num_kv_heads`).
    """
    heads = max(1, sizes.kv_heads // shared)
    return sizes.kv_cache(1, item) // sizes.kv_heads * heads


def memory_of(settings: Mapping[str, Any], *, rewarded: bool = False) -> RankMemory | None:
    """Return the memory of a rank of a run; None if a model's dimensions are not known.

    Args:
        rewarded: True if an earlier step of the chain trains the reward model, on the same base.
    """
    known, _ = look_at(settings["model"])
    training = training_settings(settings)
    if not known.config or training.world_size < 1:
        return None  # other findings report the reason
    try:
        reward = known.config if rewarded else _reward_config(settings["reward"]["model"])
        gpu = machine.gpu_memory(settings["train"]["device"])
        return rank_memory(known.config, training, gpu=gpu, reward=reward)
    except KeyError:
        return None  # an architecture that names its dimensions differently


def training_settings(settings: Mapping[str, Any]) -> Settings:
    """Return the settings of the training, with the sections of an online objective."""
    names = ("rl", "rollout", "reward") if settings["train"]["objective"] in ONLINE else ()
    sections = {name: settings[name] for name in ("train", "peft", "zero", "model", "seed")}
    return Settings.from_sections(**sections, online={name: settings[name] for name in names})


def _reward_config(folder: str | None) -> Mapping[str, Any] | None:
    """Return the config.json of `reward.model`; None if there is none."""
    path = Path(folder or "").expanduser() / "config.json"
    return read_json(path) if folder and path.is_file() else None


def rank_memory(
    config: Mapping[str, Any],
    training: Settings,
    *,
    gpu: int | None,
    reward: Mapping[str, Any] | None = None,
) -> RankMemory:
    """Add up the memory of a rank of a run.

    Args:
        gpu: bytes of each rank's GPU; None on a CPU.
        reward: contents of the reward model's config.json; None without one.

    Raises:
        KeyError: an architecture that names its dimensions differently.
    """
    policy = estimate(config, training, training.world_size, gpu=gpu is not None)
    if not training.online:
        return RankMemory(
            {"train": policy.total}, {"train": policy.states}, policy.host, policy.mapped
        )
    online = Online.of(training.online)
    models = [policy, *_critic(config, training, online, gpu=gpu is not None)]
    lasting = sum(model.lasting for model in models)
    weights, gathered = (sum(getattr(m, name) for m in models) for name in ("weights", "gathered"))
    states = lasting - weights - gathered
    away = gpu is not None and online.rollout.offload_trainer  # except in phase `train`
    resident = weights + (0 if away else states)

    frozen, scoring = _frozen(config, training, online, gpu=gpu is not None, reward=reward)
    engine = _engine(config, training, online, gpu=gpu)
    awake = asleep = engine.total if engine else 0
    if engine and gpu is not None:  # an awake engine has its activations within its share
        awake, asleep = awake + LIBRARIES, ASLEEP
    alone = {
        "generate": resident + frozen + scoring + awake,
        "score": resident + gathered + max(m.forward for m in models) + frozen + scoring + asleep,
    }
    # Models take turns: passes and steps of one, beside the lasting memory of the other.
    train = lasting + frozen + asleep
    host = sum(model.host for model in models) + (states if away else 0)
    if engine and gpu is not None and goes_as_adapter(training):
        host += engine.weights  # of a sleeping engine; without an adapter the next sync brings them
    return RankMemory(
        {**alone, "train": train + max(m.total - m.lasting for m in models)},
        {**alone, "train": train + max(m.states - m.lasting for m in models)},
        host,
        sum(model.mapped for model in models),
    )


def _critic(
    config: Mapping[str, Any], training: Settings, online: Online, *, gpu: bool
) -> Iterator[MemoryEstimate]:
    """Yield the memory of the critic: a second model, or an adapter on the policy's trunk."""
    if ALGORITHMS[training.objective].critic:
        model = estimate(config, training, training.world_size, gpu=gpu, critic=True)
        if online.loop.critic == "shared":
            weights = adapter_weights(Sizes.of(config), training) * ITEM[training.dtype]
            model = replace(model, weights=weights, gathered=0, mapped=0)
        yield model


def _frozen(
    config: Mapping[str, Any],
    training: Settings,
    online: Online,
    *,
    gpu: bool,
    reward: Mapping[str, Any] | None,
) -> tuple[int, int]:
    """Return the bytes of reference and reward model, and of a pass of the reward model.

    The rollout engine is awake while responses are scored.
    """
    loop, size, scoring = online.loop, 0, 0
    if training.peft.kind == "none" and (loop.kl_coef > 0 or loop.kl_limit is not None):
        divided = training.world_size if training.zero.stage == 3 else 1
        size += Sizes.of(config).weights() * ITEM[training.dtype] // divided
    if reward is not None:  # in the rank's own process, which is not partitioned
        sizes, dtype = replace(Sizes.of(reward), tied=True), str(reward.get("dtype") or "bfloat16")
        item = ITEM.get(dtype, 2)
        size += sizes.weights() * item
        row = replace(training, objective="reward", batch=Batch(1, 1, max_len=ROW_TOKENS // 2))
        scoring = row_bytes(sizes, row, item=item, gpu=gpu, logits=False).forward
    return size, scoring


def _engine(
    config: Mapping[str, Any], training: Settings, online: Online, *, gpu: int | None
) -> EngineMemory | None:
    """Return the memory of vLLM beside a rank, a share of servers on its CPU; None without."""
    rollout = online.rollout
    settings = {"rollout": asdict(rollout), "model": {"dtype": training.dtype}}
    engine = rollout_memory(config, settings, gpu_bytes=gpu)
    if rollout.engine == "vllm":
        return engine
    if gpu is not None or not rollout.servers:
        return None  # servers have GPUs, or machines, of their own
    share = rollout.servers / training.launch.nproc  # of the servers' memory, for each rank
    parts = {"weights": int(engine.weights * share), "cache": int(engine.cache * share)}
    return replace(engine, **parts)
