"""Memory of a rank, of the engines beside it, and of the engine that serves the model afterwards.

A run that learns from its own responses has two phases: in `rollout` the engine samples beside the
resident models; in `train` one model after the other is trained, and the engine of a GPU sleeps.
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
from tasks.rl.rollout.engine import goes_as_adapter
from tasks.rl.settings import Online
from tasks.training.engine.failure import smaller
from tasks.training.job import Settings
from tasks.training.memory import ITEM, LIBRARIES, Sizes, adapter_weights, estimate
from tasks.weights.files.documents import read_json

GIB = 2**30
ASLEEP = GIB
"""GPU memory of a sleeping engine: CUDA graphs and workspaces. An estimate, not measured."""
HEADROOM = 8
"""Tokens beyond the longest sequence, as `tasks/serving/vllm/job.py` adds them."""
GPU_SHARE = 0.92
"""Share of a GPU's memory that vLLM 0.32 takes (`gpu_memory_utilization`)."""
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank, in bytes.

    Attributes:
        peaks: peak of each phase.
        states: peak with the shortest samples.
        host: bytes offloaded from a GPU; not included above.
    """

    peaks: Mapping[str, int]
    states: int
    host: int = 0

    @property
    def total(self) -> int:
        """The peak over all phases."""
        return max(self.peaks.values())

    def __str__(self) -> str:
        each = ", ".join(f"{name} {in_words(size)}" for name, size in self.peaks.items())
        phases = f" ({each})" if len(self.peaks) > 1 else ""
        return f"{in_words(self.total)} at its peak{phases}"


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one engine, or of each process if several share a model, without libraries.

    Attributes:
        weights: weights in the served format.
        cache: the KV cache.
        longest: keys and values of one sequence of `context` tokens.
        context: tokens of the longest sequence.
    """

    weights: int
    cache: int
    longest: int
    context: int

    @property
    def total(self) -> int:
        """Bytes of weights and cache."""
        return self.weights + self.cache

    def __str__(self) -> str:
        return (
            f"{in_words(self.total)} (weights {in_words(self.weights)}, KV cache "
            f"{in_words(self.cache)}: {self.cache // self.longest} sequences of {self.context} "
            "tokens)"
        )


def in_words(size: int) -> str:
    """Return a size with its unit, such as 14.2 GiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


def problems(context: Context) -> Iterator[Finding]:
    """Yield what does not fit into the memory of this machine."""
    rank, settings = context.rank, context.settings
    train, free = settings["train"], machine.available_memory()
    gpu, count = machine.gpu_memory(train["device"]), train["nproc"]
    less = " or ".join(smaller(training_settings(settings)))
    if rank is None:  # the dimensions are not known, the size may be
        size = count * 2 * (context.known.parameters or 0)
        yield from fits("memory", free, size, size, less) if gpu is None else ()
        return
    if gpu is None:
        states, total = (count * (size + LIBRARIES) for size in (rank.states, rank.total))
        yield from fits("memory", free, states, total, less)
    else:
        yield from fits("GPU memory", gpu, rank.states + LIBRARIES, rank.total + LIBRARIES, less)
        host = count * (rank.host + LIBRARIES)
        offloaded = "zero.offload_optimizer=none or rollout.offload_trainer=false"
        yield from fits("memory", free, host, host, offloaded)
    yield from _engines(context, free, gpu)


def fits(what: str, available: int, states: int, total: int, less: str) -> Iterator[Finding]:
    """Compare memory with what is available, in bytes.

    `states` is always needed; `total` only if every sample is as long as allowed, so a lack of that
    is a warning.
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
        engine = rollout_memory(config, rollout, settings["model"]["dtype"], gpu_bytes=gpu)
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
    if gpu is not None:
        override = "smoke.tensor_parallel=<GPUs> or smoke.max_model_len=<tokens>"
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

    `gpus` is the number of visible GPUs if each process needs one of its own.
    """
    if gpus and processes > gpus:
        allowed = f"a GPU for each process, and {gpus} {'is' if gpus == 1 else 'are'} visible"
        yield Finding(key, str(processes), allowed, f"{key}={gpus}")
    elif processes > 1 and not _divides(config, processes):
        most = max(count for count in range(1, processes) if _divides(config, count))
        allowed = "a number by which vLLM can divide the model's attention heads and its widths"
        yield Finding(key, str(processes), allowed, f"{key}={most}")


def _divides(config: Mapping[str, Any], processes: int) -> bool:
    text = config.get("text_config") or config
    heads = int(text.get("num_attention_heads") or 0)
    keys = int(text.get("num_key_value_heads") or heads)
    widths = [int(text.get(name) or 0) for name in _WIDTHS]
    shared = keys % processes == 0 or (keys > 0 and processes % keys == 0)
    return shared and not any(size % processes for size in (heads, *widths))


def engine_memory(
    config: Mapping[str, Any], settings: Mapping[str, Any], *, gpu_bytes: int | None
) -> EngineMemory:
    """Return the memory of smoke_eval's engine; `gpu_bytes` is None for a CPU.

    Raises:
        KeyError: an architecture that names its dimensions differently.
    """
    smoke, text = settings["smoke"], config.get("text_config") or config
    needed = settings["train"]["max_len"] + smoke["max_new_tokens"] + HEADROOM
    context = smoke["max_model_len"] or min(needed, text.get("max_position_embeddings", needed))
    alone = smoke["engine"] == "transformers"
    shared = 1 if alone else smoke["tensor_parallel"]
    gib = smoke["kv_cache_gib"] if gpu_bytes is None else None
    share = GPU_SHARE * (gpu_bytes or 0)
    engine = _engine(config, ITEM[engine_dtype(settings)], shared, int(context), gib, share)
    # transformers takes one prompt at a time.
    return replace(engine, cache=engine.longest) if alone else engine


def rollout_memory(
    config: Mapping[str, Any], rollout: Mapping[str, Any], dtype: str, *, gpu_bytes: int | None
) -> EngineMemory:
    """Return the memory of vLLM beside each rank of an online run; see `engine_memory`."""
    context = rollout["max_prompt_len"] + rollout["max_new_tokens"]
    gib = rollout["kv_cache_gib"] if gpu_bytes is None else None
    share = rollout["gpu_memory"] * (gpu_bytes or 0)
    return _engine(config, ITEM[dtype], rollout["tensor_parallel"], context, gib, share)


def _engine(
    config: Mapping[str, Any], item: int, shared: int, context: int, gib: float | None, share: float
) -> EngineMemory:
    """Return the memory of an engine with a cache of `gib`, or on `share` bytes of a GPU."""
    sizes = Sizes.of(config)
    weights = sizes.weights() * item // shared
    cache = int(share) - weights - LIBRARIES if gib is None else int(gib * GIB)
    # Each process has at least one whole head of the keys and values.
    token = sizes.kv_cache(1, item) // sizes.kv_heads * max(1, sizes.kv_heads // shared)
    return EngineMemory(weights, max(0, cache), context * token, context)


def memory_of(settings: Mapping[str, Any], *, rewarded: bool = False) -> RankMemory | None:
    """Return the memory of a rank of a run; None if a model's dimensions are not known.

    `rewarded`: an earlier step of the chain trains the reward model, on the same base.
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

    `gpu` has the bytes of each rank's GPU, None on a CPU; `reward` is the config.json of a reward
    model. Raises KeyError for an architecture that names its dimensions differently.
    """
    on_gpu, item = gpu is not None, ITEM[training.dtype]
    policy = estimate(config, training, gpu=on_gpu)
    if not training.online:
        least = policy.lasting + policy.gradients
        return RankMemory({"train": policy.total}, least, policy.host)
    online, models = Online.of(training.online), [policy]
    if ALGORITHMS[training.objective].critic:
        critic = estimate(config, training, gpu=on_gpu, critic=True)
        if online.loop.critic == "shared":  # an adapter on the policy's trunk
            critic = replace(critic, weights=adapter_weights(Sizes.of(config), training) * item)
        models.append(critic)
    frozen = 0
    if training.peft.kind == "none" and (
        online.loop.kl_coef > 0 or online.loop.kl_limit is not None
    ):
        divided = training.world_size if training.zero.stage == 3 else 1
        frozen += Sizes.of(config).weights() * item // divided  # the reference
    if reward is not None:
        dtype = str(reward.get("dtype") or "bfloat16")
        frozen += replace(Sizes.of(reward), tied=True).weights() * ITEM.get(dtype, 2)
    awake = asleep = host = 0
    if engine := _beside(config, training, online, gpu=gpu):
        awake = asleep = engine.total
        if on_gpu:
            awake, asleep = awake + LIBRARIES, ASLEEP
            # Without an adapter the next sync brings all weights.
            host = engine.weights if goes_as_adapter(training) else 0
    weights, states = (sum(getattr(m, name) for m in models) for name in ("weights", "states"))
    host += sum(model.host for model in models)
    resident = weights + frozen
    if on_gpu and online.rollout.offload_trainer:
        host += states
    else:
        resident += states
    lasting = weights + states + frozen + asleep
    forward = max(model.forward for model in models)
    peaks = {
        "rollout": resident + max(awake, asleep + forward),
        "train": lasting + max(model.gradients + model.activations for model in models),
    }
    least = lasting + max(model.gradients for model in models)
    return RankMemory(peaks, max(peaks["rollout"], least), host)


def _beside(
    config: Mapping[str, Any], training: Settings, online: Online, *, gpu: int | None
) -> EngineMemory | None:
    """Return the memory of vLLM beside a rank, a share of servers on its CPU; None without."""
    rollout = online.rollout
    engine = rollout_memory(config, asdict(rollout), training.dtype, gpu_bytes=gpu)
    if rollout.engine == "vllm":
        return engine
    if gpu is not None or not rollout.servers:
        return None  # servers have GPUs, or machines, of their own
    share = rollout.servers / training.launch.nproc
    return replace(engine, weights=int(engine.weights * share), cache=int(engine.cache * share))
