"""Estimated memory: of a training rank, of the engine beside it, and of the engine after it.

All from the model's `config.json`: weights, gradients and optimizer states (Rajbhandari et al.
2020, "ZeRO", divided over the ranks from the stage that partitions them), activations and logits of
the longest row. A run that learns from its own responses has two phases: the engine samples beside
the resident models; then one model after the other is trained, and the engine of a GPU sleeps.
Imported libraries, about `LIBRARIES` a process, are not included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tasks.config.checks import Context
from tasks.config.defaults import ONLINE, PAIRS
from tasks.config.sections import engine_dtype
from tasks.core import machine
from tasks.core.errors import Finding
from tasks.core.terminal import in_words
from tasks.rl.algorithms import ALGORITHMS
from tasks.rl.settings import Online, goes_as_adapter
from tasks.training.engine.failure import smaller
from tasks.training.engine.zero_config import accumulates_in_fp32
from tasks.training.job import Peft, Settings
from tasks.training.model.families import experts_of
from tasks.weights.files.documents import read_json

GIB = 2**30
ITEM = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a number, by dtype."""
LIBRARIES = GIB
ASLEEP = GIB
"""GPU memory of a sleeping engine: CUDA graphs and workspaces. An estimate, not measured."""
GPU_SHARE = 0.92
"""Share of a GPU's memory that vLLM 0.32 takes (`gpu_memory_utilization`)."""
MIXTURES = {"mixtral": True, "qwen3_moe": True, "olmoe": True, "gpt_oss": False}
"""Families of experts whose dimensions are read here: True if peft adapts experts and routers."""


class Sizes:
    """Dimensions of a decoder, without towers for images and sound, from its `config.json`.

    KeyError if the family names its dimensions differently. Layers with linear attention (Qwen3.5)
    count as those with full attention: 2 % more.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        text = config.get("text_config") or config
        heads, family, count = text["num_attention_heads"], text.get("model_type"), experts_of(text)
        self.hidden: int = text["hidden_size"]
        self.layers: int = text["num_hidden_layers"]
        self.vocab: int = text["vocab_size"]
        self.inner: int = text["intermediate_size"]
        self.kv_heads: int = text.get("num_key_value_heads") or heads
        self.head_dim: int = text.get("head_dim") or self.hidden // heads
        self.query, keys = heads * self.head_dim, self.kv_heads * self.head_dim
        # Layers with keys and values, and embeddings that each layer has of its own (Gemma 4).
        self.cached = self.layers - (text.get("layer_types") or ()).count("linear_attention")
        width = text.get("hidden_size_per_layer_input") or 0
        rows = text.get("vocab_size_per_layer_input") or 0
        self.embeddings = self.layers * width * (rows + 3 * self.hidden)
        self.tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        # Linear maps of a layer: widths of input and output.
        gated = 2 if family == "qwen3_5_text" else 1
        self.maps = {
            "q_proj": (self.hidden, gated * self.query),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (self.query, self.hidden),
        }
        # Experts and routers, which QLoRA leaves in 16 bits, and a LoRA of rank 1 on all of them.
        self.experts = self.expert_pairs = 0
        if count <= 1:
            up = (self.hidden, self.inner)
            self.maps |= {"gate_proj": up, "up_proj": up, "down_proj": (self.inner, self.hidden)}
        elif family not in MIXTURES:
            raise KeyError(f"dimensions as read here: {family} is another mixture of experts")
        else:
            wide = text.get("moe_intermediate_size") or self.inner
            self.inner = text["num_experts_per_tok"] * wide  # that a token passes through
            self.experts = self.layers * self.hidden * (3 * count * wide + count)
            if MIXTURES[family]:  # peft doubles the rank of `gate_up_proj`, which holds two maps
                each = 2 * (self.hidden + 2 * wide) + wide + self.hidden
                self.expert_pairs = self.layers * (count * each + self.hidden + count)

    def linear_weights(self) -> int:
        """Return the number of weights in the linear maps of all layers."""
        return self.layers * sum(width * out for width, out in self.maps.values())

    def weights(self, *, scored: bool = False) -> int:
        """Return the number of weights, without biases; `scored`: with a score head, a vector."""
        tables = self.vocab * self.hidden * (1 if self.tied or scored else 2)
        norms = self.hidden * (2 * self.layers + 1)
        return self.linear_weights() + tables + norms + self.embeddings + self.experts

    def adapter_weights(self, peft: Peft) -> int:
        """Return the weights of a LoRA adapter, and of tables that are trained in full."""
        everything = isinstance(peft.target_modules, str)
        targets = set(self.maps) if everything else set(self.maps) & set(peft.target_modules)
        pairs = peft.rank * self.expert_pairs if everything else 0
        for name in targets - set(peft.exclude_modules):
            rank = (peft.rank_pattern or {}).get(name, peft.rank)
            pairs += self.layers * rank * sum(self.maps[name])
        saved = sum(name in ("embed_tokens", "lm_head") for name in peft.modules_to_save)
        return pairs + saved * self.vocab * self.hidden


@dataclass(frozen=True)
class Memory:
    """Memory of one rank, in bytes: for one model, or for all of an online run."""

    weights: int  # stored weights, and those that ZeRO-3 gathers for a pass
    optimizer: int  # master weights and moments
    gradients: int  # with their bucket, and in fp32 for the optimizer step
    activations: int  # of the longest row
    logits: int  # a portion of that row's, with their gradients
    host: int = 0  # offloaded from a GPU; not part of the other fields
    engine: int = 0  # vLLM while it samples
    asleep: int = 0  # vLLM while the rank trains
    offloaded: int = 0  # part of `optimizer` that is on the host while vLLM samples

    @property
    def total(self) -> int:
        """Peak memory with the longest samples."""
        samples = self.weights + self.optimizer - self.offloaded + self.engine
        trains = self.weights + self.optimizer + self.gradients + self.activations + self.logits
        return max(samples, trains + self.asleep)

    @property
    def least(self) -> int:
        """Peak memory with the shortest samples."""
        return replace(self, activations=0, logits=0).total

    def __str__(self) -> str:
        names = ("weights", "optimizer", "gradients", "activations", "logits", "engine")
        parts = ((name, getattr(self, name)) for name in names)
        each = ", ".join(f"{name} {in_words(size)}" for name, size in parts if size)
        return f"{in_words(self.total)} at its peak ({each})"


def estimate(
    config: Mapping[str, Any], settings: Settings, *, gpu: bool = False, critic: bool = False
) -> Memory:
    """Estimate the peak memory of one rank for one model.

    `critic`: a separate critic, which contains the policy's head and does not train it. Raises
    KeyError as `Sizes`.
    """
    sizes, zero, peft = Sizes(config), settings.zero, settings.peft
    item, ranks, is_full = ITEM[settings.dtype], settings.world_size, peft.kind == "none"
    scored = critic or settings.objective == "reward"
    stored = sizes.weights(scored=scored and not critic)
    trained = sizes.weights(scored=scored) if is_full else sizes.adapter_weights(peft)
    over = {stage: ranks if zero.stage >= stage else 1 for stage in (1, 2, 3)}

    weights = stored * item + (0 if is_full else trained * item)
    if peft.kind == "qlora":  # half a byte, and the scale of a block of 64
        scale = 1.03 / 64 if peft.double_quant else 4 / 64
        weights -= int(sizes.linear_weights() * (item - 0.5 - scale))
    weights //= over[3]
    # ZeRO-3 keeps at most 10^9 weights gathered (`stage3_max_live_parameters`).
    gathered = min(stored, 10**9) * item if over[3] > 1 else 0

    moments = 8.0 if settings.optim.optimizer == "adamw" else 2 * (1 + 4 / 256)
    master = 0 if settings.dtype == "float32" else 4
    optimizer = int(trained / over[1] * (master + moments))
    summed = 4 if accumulates_in_fp32(settings, ranks) else item
    bucket = zero.bucket_size if gpu else min(trained, zero.bucket_size)
    # ZeRO-1 and 2 fill a second bucket while the first is sent (`stage_1_and_2.setup_buckets`).
    buckets = (2 if zero.overlap_comm and zero.stage < 3 else 1) if zero.stage else 0
    gradients = trained * summed // over[2] + buckets * bucket * item
    gradients += trained // over[1] * 4  # in fp32, during the step

    host = 0
    if gpu and zero.offload_optimizer == "cpu":
        host, optimizer = optimizer, 0
    if gpu and zero.offload_param == "cpu":
        host, weights = host + weights, 0
    longest = settings.batch.max_len
    if settings.online:
        rollout = settings.online["rollout"]
        longest = rollout["max_prompt_len"] + rollout["max_new_tokens"]
    longest *= 2 if settings.objective in PAIRS else 1  # chosen and rejected share a row
    tokens = math.ceil(
        settings.batch.micro_batch_size * longest / settings.launch.sequence_parallel
    )
    # Norms in fp32 and in the model's dtype, attention, gate, its activation, up, their product.
    numbers = 2 * sizes.hidden + 4 * sizes.query + 4 * sizes.inner
    layer = tokens * (numbers * item + 2 * sizes.hidden * 4)
    if not is_full:
        layer += tokens * len(sizes.maps) * peft.rank * item
        if sizes.expert_pairs and isinstance(peft.target_modules, str):
            # peft computes the sum of a layer's experts and their update, and keeps it.
            layer += 2 * item * sizes.experts // sizes.layers
    activations = sizes.layers * layer
    if settings.gradient_checkpointing:
        activations = sizes.layers * tokens * sizes.hidden * item + layer
    portion = 0 if scored else min(tokens * sizes.vocab, 1 << 25)  # `packed_model.PORTION`
    logits = portion * (12 + item if is_full or "lm_head" in peft.modules_to_save else 4)
    return Memory(weights + gathered, optimizer, gradients, activations, logits, host)


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of an engine, or of each process if several share a model, without libraries."""

    weights: int
    cache: int
    longest: int  # keys and values of a sequence of `context` tokens
    context: int

    def __str__(self) -> str:
        return (
            f"{in_words(self.weights + self.cache)} (weights {in_words(self.weights)}, KV cache "
            f"{in_words(self.cache)}: {self.cache // self.longest} sequences of {self.context} "
            "tokens)"
        )


def _engine(
    config: Mapping[str, Any], dtype: str, context: int, shared: int, gpu: float | None, gib: float
) -> EngineMemory:
    """Return the memory of vLLM on `gpu` bytes of a GPU, or on a CPU with a cache of `gib`."""
    sizes, item = Sizes(config), ITEM[dtype]
    weights = sizes.weights() * item // shared
    cache = int(gib * GIB) if gpu is None else max(0, int(gpu) - weights - LIBRARIES)
    heads = max(1, sizes.kv_heads // shared)  # each process has at least one whole head
    longest = 2 * sizes.cached * heads * sizes.head_dim * context * item
    return EngineMemory(weights, cache, longest, context)


def engine_memory(
    config: Mapping[str, Any], settings: Mapping[str, Any], *, gpu_bytes: int | None
) -> EngineMemory:
    """Return the memory of smoke_eval's engine; `gpu_bytes` is None for a CPU."""
    smoke, text = settings["smoke"], config.get("text_config") or config
    needed = settings["train"]["max_len"] + smoke["max_new_tokens"] + 8  # as serving/vllm/job.py
    context = smoke["max_model_len"] or min(needed, text.get("max_position_embeddings", needed))
    alone = smoke["engine"] == "transformers"
    shared, gpu = 1 if alone else smoke["tensor_parallel"], gpu_bytes and GPU_SHARE * gpu_bytes
    engine = _engine(config, engine_dtype(settings), context, shared, gpu, smoke["kv_cache_gib"])
    # transformers takes one prompt at a time.
    return replace(engine, cache=engine.longest) if alone else engine


def rollout_memory(
    config: Mapping[str, Any], rollout: Mapping[str, Any], dtype: str, *, gpu_bytes: int | None
) -> EngineMemory:
    """Return the memory of vLLM beside each rank of an online run; see `engine_memory`."""
    context = rollout["max_prompt_len"] + rollout["max_new_tokens"]
    shared, gpu = rollout["tensor_parallel"], gpu_bytes and rollout["gpu_memory"] * gpu_bytes
    return _engine(config, dtype, context, shared, gpu, rollout["kv_cache_gib"])


def training_settings(settings: Mapping[str, Any]) -> Settings:
    """Return the settings of the training, with the sections of an online objective."""
    names = ("rl", "rollout", "reward") if settings["train"]["objective"] in ONLINE else ()
    sections = {name: settings[name] for name in ("train", "peft", "zero", "model", "seed")}
    return Settings.from_sections(**sections, online={name: settings[name] for name in names})


def memory_of(settings: Mapping[str, Any], *, rewarded: bool = False) -> Memory | None:
    """Return the memory of a rank of a run; None if a model's dimensions are not known.

    `rewarded`: an earlier step of the chain trains the reward model, on the same base.
    """
    from tasks.config.checks.model import look_at

    config = look_at(settings["model"])[0].config
    training, gpu = training_settings(settings), machine.gpu_memory(settings["train"]["device"])
    if not config or training.world_size < 1:
        return None  # other findings report the reason
    try:
        policy = estimate(config, training, gpu=gpu is not None)
        if not training.online:
            return policy
        reward = Path(settings["reward"]["model"] or "").expanduser() / "config.json"
        scorer = config if rewarded else read_json(reward) if reward.is_file() else None
        return _online(config, training, policy, scorer, gpu)
    except KeyError:
        return None  # an architecture that names its dimensions differently


def _online(
    config: Mapping[str, Any],
    training: Settings,
    policy: Memory,
    reward: Mapping[str, Any] | None,
    gpu: int | None,
) -> Memory:
    """Add up policy, critic, reference, the reward model of config `reward`, and the engine."""
    sizes, online = Sizes(config), Online.of(training.online)
    models, item, loop, rollout = [policy], ITEM[training.dtype], online.loop, online.rollout
    if ALGORITHMS[training.objective].critic:
        critic = estimate(config, training, gpu=gpu is not None, critic=True)
        if loop.critic == "shared":  # an adapter on the policy's trunk
            critic = replace(critic, weights=sizes.adapter_weights(training.peft) * item)
        models.append(critic)
    weights = sum(model.weights for model in models)
    if training.peft.kind == "none" and (loop.kl_coef > 0 or loop.kl_limit is not None):
        divided = training.world_size if training.zero.stage == 3 else 1
        weights += sizes.weights() * item // divided  # the reference
    if reward is not None:
        dtype = str(reward.get("dtype") or "bfloat16")
        weights += Sizes(reward).weights(scored=True) * ITEM.get(dtype, 2)
    optimizer, host = (sum(getattr(m, n) for m in models) for n in ("optimizer", "host"))
    engine, share = rollout_memory(config, asdict(rollout), training.dtype, gpu_bytes=gpu), 1.0
    if rollout.engine != "vllm":  # on a CPU each rank has a share of the servers
        share = 0.0 if gpu else (rollout.servers or 0) / training.launch.nproc
    awake = asleep = int(engine.weights * share) + int(engine.cache * share)
    if gpu and share:
        awake, asleep = awake + LIBRARIES, ASLEEP
        # Without an adapter the next sync brings all weights.
        host += engine.weights if goes_as_adapter(training) else 0
    offloaded = optimizer if gpu and rollout.offload_trainer else 0
    return replace(
        max(models, key=lambda m: m.gradients + m.activations + m.logits),
        weights=weights, optimizer=optimizer, host=host + offloaded, engine=awake, asleep=asleep,
        offloaded=offloaded,
    )  # fmt: skip


def problems(context: Context) -> Iterator[Finding]:
    """Yield what does not fit into the memory of this machine."""
    settings, config = context.settings, context.known.config
    rank = memory_of(settings, rewarded=context.rewarded)
    train, rollout = settings["train"], settings["rollout"]
    gpu, count = machine.gpu_memory(train["device"]), train["nproc"]
    free, less = machine.available_memory(), " or ".join(smaller(training_settings(settings)))
    if rank is None:  # the dimensions are not known, the size may be
        needed = count * 2 * (context.known.parameters or 0)
        if gpu is None and free < needed:
            allowed = f"needs about {needed / GIB:.1f} GiB"
            yield Finding("memory", f"{free / GIB:.1f} GiB available", allowed, less)
        return
    least, total, host = (size + LIBRARIES for size in (rank.least, rank.total, rank.host))
    own = [("memory", free, count * least, count * total, less)]
    if gpu is not None:
        own = [("GPU memory", gpu, least, total, less)]
        override = "zero.offload_optimizer=none or rollout.offload_trainer=false"
        own.append(("memory", free, count * host, count * host, override))
    for what, available, needed, longest, override in own:
        value = f"{available / GIB:.1f} GiB available"
        if available < needed:
            yield Finding(what, value, f"needs about {needed / GIB:.1f} GiB", override)
        elif available < longest:  # only if every sample is as long as allowed
            allowed = f"up to {longest / GIB:.1f} GiB with the longest samples"
            yield Finding(what, value, allowed, override, "warning")
    if context.online and not rollout["urls"]:
        engine = rollout_memory(config, rollout, settings["model"]["dtype"], gpu_bytes=gpu)
        override = f"rollout.kv_cache_gib={-(-engine.longest // GIB)}"
        if gpu is not None:
            used = engine.weights + engine.longest + LIBRARIES
            override = f"rollout.gpu_memory={math.ceil(100 * used / gpu) / 100:g}"
        yield from _cache_fits(engine, override)
    gpu = machine.gpu_memory()
    engine = engine_memory(config, settings, gpu_bytes=gpu)
    more = "tensor_parallel=<GPUs>" if gpu else f"kv_cache_gib={-(-engine.longest // GIB)}"
    yield from _cache_fits(engine, f"smoke.{more} or smoke.max_model_len=<tokens>")


def _cache_fits(engine: EngineMemory, override: str) -> Iterator[Finding]:
    """Check that the KV cache holds one sequence of full length, which vLLM needs to start."""
    if engine.longest > engine.cache:
        value = f"{engine.cache / GIB:.1f} GiB for keys and values"
        allowed = f"one sequence of {engine.context} tokens needs {engine.longest / GIB:.1f} GiB"
        yield Finding(override.partition("=")[0], value, allowed, override)
