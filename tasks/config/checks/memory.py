"""Estimated memory: of a training rank, of the engines beside it, and of the engine after it.

All from the model's `config.json`: weights, gradients and optimizer states (Rajbhandari et al.
2020, "ZeRO", divided over the ranks from the stage that partitions them), and activations of the
longest row. A run that learns from its own responses has two phases: in `rollout` the engine
samples beside the resident models; in `train` one model after the other is trained, and the engine
of a GPU sleeps. Imported libraries, about `LIBRARIES` a process, are not included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tasks.config.after_training import engine_dtype
from tasks.config.checks.context import Context
from tasks.config.defaults import ONLINE, PAIRS
from tasks.core import machine
from tasks.core.finding import Finding
from tasks.rl.algorithms import ALGORITHMS
from tasks.rl.rollout.engine import goes_as_adapter
from tasks.rl.settings import Online
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


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a decoder, without towers for images and sound."""

    hidden: int
    inner: int  # width of all feed-forward blocks that a token passes through
    layers: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool  # True if the output head is the input embedding
    cached: int  # layers with keys and values
    maps: Mapping[str, tuple[int, int]]  # linear maps of a layer: widths of input and output
    experts: int  # weights of experts and routers, which QLoRA leaves in 16 bits
    expert_pairs: int  # weights of a LoRA of rank 1 on all of them; 0 if peft adapts none
    embeddings: int  # weights of embeddings that each layer has of its own (Gemma 4)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Sizes:
        """Read them from `config.json`; KeyError if the family names its dimensions differently.

        Layers with linear attention (Qwen3.5) count as those with full attention: 2 % more.
        """
        text = config.get("text_config") or config
        hidden, layers, heads = (
            text[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
        inner, family, count = text["intermediate_size"], text.get("model_type"), experts_of(text)
        kv_heads = text.get("num_key_value_heads") or heads
        head_dim = text.get("head_dim") or hidden // heads
        query, keys = heads * head_dim, kv_heads * head_dim
        gated = family == "qwen3_5_text"
        experts = pairs = 0
        maps = {
            "q_proj": (hidden, 2 * query if gated else query),
            "k_proj": (hidden, keys),
            "v_proj": (hidden, keys),
            "o_proj": (query, hidden),
        }
        if count <= 1:
            up = (hidden, inner)
            maps |= {"gate_proj": up, "up_proj": up, "down_proj": (inner, hidden)}
        elif family not in MIXTURES:
            raise KeyError(f"dimensions as read here: {family} is another mixture of experts")
        else:
            wide = text.get("moe_intermediate_size") or inner
            inner = text["num_experts_per_tok"] * wide
            experts = layers * hidden * (3 * count * wide + count)
            if MIXTURES[family]:  # peft doubles the rank of `gate_up_proj`, which holds two maps
                each = 2 * (hidden + 2 * wide) + wide + hidden
                pairs = layers * (count * each + hidden + count)
        linear = (text.get("layer_types") or ()).count("linear_attention")
        width = text.get("hidden_size_per_layer_input") or 0
        rows = text.get("vocab_size_per_layer_input") or 0
        tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
        return cls(
            hidden, inner, layers, text["vocab_size"], heads, kv_heads, head_dim, tied,
            layers - linear, maps, experts, pairs, layers * width * (rows + 3 * hidden),
        )  # fmt: skip

    def linear_weights(self) -> int:
        """Return the number of weights in the linear maps of all layers."""
        return self.layers * sum(width * out for width, out in self.maps.values())

    def weights(self) -> int:
        """Return the number of weights of a causal model, without biases."""
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        norms = self.hidden * (2 * self.layers + 1)
        return self.linear_weights() + tables + norms + self.embeddings + self.experts

    def adapter_weights(self, peft: Peft) -> int:
        """Return the weights of a LoRA adapter, and of tables that are trained in full."""
        everything = isinstance(peft.target_modules, str)
        targets = set(self.maps) if everything else set(peft.target_modules)
        pairs = peft.rank * self.expert_pairs if everything else 0
        for name in targets & set(self.maps) - set(peft.exclude_modules):
            rank = (peft.rank_pattern or {}).get(name, peft.rank)
            pairs += self.layers * rank * sum(self.maps[name])
        tables = sum(name in ("embed_tokens", "lm_head") for name in peft.modules_to_save)
        return pairs + tables * self.vocab * self.hidden

    def kv_cache(self, tokens: int, item: int = 2, shared: int = 1) -> int:
        """Return the bytes of keys and values of `tokens` tokens in one of `shared` processes.

        Each process has at least one whole head.
        """
        heads = max(1, self.kv_heads // shared)
        return 2 * self.cached * heads * self.head_dim * tokens * item


@dataclass(frozen=True)
class ModelMemory:
    """Memory of one rank for one model, in bytes."""

    weights: int  # stored weights, and those that ZeRO-3 gathers for a pass
    states: int  # master weights and moments
    gradients: int  # with their bucket, and in fp32 for the optimizer step
    activations: int  # activations and logits of the longest row, in training
    forward: int  # the same in a pass without gradients
    host: int = 0  # states and weights offloaded from a GPU; not part of the fields above

    @property
    def total(self) -> int:
        """Peak memory with the longest samples."""
        return self.weights + self.states + self.gradients + self.activations


def estimate(
    config: Mapping[str, Any], settings: Settings, *, gpu: bool = False, critic: bool = False
) -> ModelMemory:
    """Estimate the peak memory of one rank for one model.

    `critic`: a separate critic, which contains the policy's head and does not train it. Raises
    KeyError as `Sizes.of`.
    """
    sizes, zero, peft = Sizes.of(config), settings.zero, settings.peft
    item, ranks = ITEM[settings.dtype], settings.world_size
    scored = critic or settings.objective == "reward"
    headless = replace(sizes, tied=True) if scored else sizes  # a score head is a vector
    stored = sizes if critic else headless
    trained = headless.weights() if peft.kind == "none" else headless.adapter_weights(peft)
    over = {stage: ranks if zero.stage >= stage else 1 for stage in (1, 2, 3)}

    weights = stored.weights() * item + (trained * item if peft.kind != "none" else 0)
    if peft.kind == "qlora":  # half a byte, and the scale of a block of 64
        scale = 1.03 / 64 if peft.double_quant else 4 / 64
        weights -= int(stored.linear_weights() * (item - 0.5 - scale))
    weights //= over[3]
    # ZeRO-3 keeps at most 10^9 weights gathered (`stage3_max_live_parameters`).
    gathered = min(stored.weights(), 10**9) * item if over[3] > 1 else 0

    moments = 8.0 if settings.optim.optimizer == "adamw" else 2 * (1 + 4 / 256)
    master = 0 if settings.dtype == "float32" else 4
    optimizer = int(trained / over[1] * (master + moments))
    summed = 4 if accumulates_in_fp32(settings, ranks) else item
    bucket = zero.bucket_size if gpu else min(trained, zero.bucket_size)
    gradients = trained * summed // over[2] + (bucket * item if zero.stage else 0)
    gradients += trained // over[1] * 4  # in fp32, during the step

    kept, forward = _activations(headless, settings, item, logits=not scored)
    host = 0
    if gpu and zero.offload_optimizer == "cpu":
        host, optimizer = optimizer, 0
    if gpu and zero.offload_param == "cpu":
        host, weights = host + weights, 0
    return ModelMemory(weights + gathered, optimizer, gradients, kept, forward, host)


def _activations(sizes: Sizes, settings: Settings, item: int, *, logits: bool) -> tuple[int, int]:
    """Return the bytes of the longest row: kept for the backward pass, and without gradients."""
    peft, hidden, longest = settings.peft, sizes.hidden, settings.batch.max_len
    if settings.online:
        rollout = settings.online["rollout"]
        longest = int(rollout["max_prompt_len"] + rollout["max_new_tokens"])
    roles = 2 if settings.objective in PAIRS else 1  # chosen and rejected share a row
    tokens = settings.batch.micro_batch_size * longest * roles
    tokens = -(-tokens // settings.launch.sequence_parallel)
    # Norms in fp32 and in the model's dtype, attention, gate, its activation, up, their product.
    numbers = 2 * hidden + 4 * sizes.heads * sizes.head_dim + 4 * sizes.inner
    layer = tokens * (numbers * item + 2 * hidden * 4)
    if peft.kind != "none":
        layer += tokens * len(sizes.maps) * peft.rank * item
        if sizes.expert_pairs and isinstance(peft.target_modules, str):
            # peft computes the sum of a layer's experts and their update, and keeps it.
            layer += 2 * item * sizes.experts // sizes.layers
    layers = sizes.layers * layer
    if settings.gradient_checkpointing:
        layers = sizes.layers * tokens * hidden * item + layer
    trained = peft.kind == "none" or "lm_head" in peft.modules_to_save
    portion = min(tokens * sizes.vocab, 1 << 25)  # `PORTION` of training/model/head.py
    head = portion * (12 + item if trained else 4) if logits else 0
    return layers + head, layer + head


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of an engine, or of each process if several share a model, without libraries."""

    weights: int
    cache: int
    longest: int  # keys and values of a sequence of `context` tokens
    context: int

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        dtype: str,
        context: int,
        *,
        shared: int,
        share: float | None,
        gib: float,
    ) -> EngineMemory:
        """Return the memory of an engine on `share` bytes of a GPU, or with a cache of `gib`."""
        sizes, item = Sizes.of(config), ITEM[dtype]
        weights = sizes.weights() * item // shared
        cache = int(gib * GIB) if share is None else max(0, int(share) - weights - LIBRARIES)
        return cls(weights, cache, sizes.kv_cache(context, item, shared), context)

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


def engine_memory(
    config: Mapping[str, Any], settings: Mapping[str, Any], *, gpu_bytes: int | None
) -> EngineMemory:
    """Return the memory of smoke_eval's engine; `gpu_bytes` is None for a CPU."""
    smoke, text = settings["smoke"], config.get("text_config") or config
    needed = settings["train"]["max_len"] + smoke["max_new_tokens"] + 8  # as serving/vllm/job.py
    context = smoke["max_model_len"] or min(needed, text.get("max_position_embeddings", needed))
    alone = smoke["engine"] == "transformers"
    engine = EngineMemory.of(
        config, engine_dtype(settings), int(context),
        shared=1 if alone else smoke["tensor_parallel"],
        share=GPU_SHARE * gpu_bytes if gpu_bytes else None, gib=smoke["kv_cache_gib"],
    )  # fmt: skip
    # transformers takes one prompt at a time.
    return replace(engine, cache=engine.longest) if alone else engine


def rollout_memory(
    config: Mapping[str, Any], rollout: Mapping[str, Any], dtype: str, *, gpu_bytes: int | None
) -> EngineMemory:
    """Return the memory of vLLM beside each rank of an online run; see `engine_memory`."""
    return EngineMemory.of(
        config, dtype, rollout["max_prompt_len"] + rollout["max_new_tokens"],
        shared=rollout["tensor_parallel"],
        share=rollout["gpu_memory"] * gpu_bytes if gpu_bytes else None, gib=rollout["kv_cache_gib"],
    )  # fmt: skip


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank, in bytes."""

    peaks: Mapping[str, int]  # of each phase
    states: int  # the peak with the shortest samples
    host: int = 0  # bytes offloaded from a GPU; not included above

    @property
    def total(self) -> int:
        """The peak over all phases."""
        return max(self.peaks.values())

    def __str__(self) -> str:
        each = ", ".join(f"{name} {in_words(size)}" for name, size in self.peaks.items())
        phases = f" ({each})" if len(self.peaks) > 1 else ""
        return f"{in_words(self.total)} at its peak{phases}"


def in_words(size: int) -> str:
    """Return a size with its unit, such as 14.2 GiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


def training_settings(settings: Mapping[str, Any]) -> Settings:
    """Return the settings of the training, with the sections of an online objective."""
    names = ("rl", "rollout", "reward") if settings["train"]["objective"] in ONLINE else ()
    sections = {name: settings[name] for name in ("train", "peft", "zero", "model", "seed")}
    return Settings.from_sections(**sections, online={name: settings[name] for name in names})


def memory_of(settings: Mapping[str, Any], *, rewarded: bool = False) -> RankMemory | None:
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
            least = policy.weights + policy.states + policy.gradients
            return RankMemory({"train": policy.total}, least, policy.host)
        reward = Path(settings["reward"]["model"] or "").expanduser() / "config.json"
        scorer = config if rewarded else read_json(reward) if reward.is_file() else None
        return _online_memory(config, training, policy, scorer, gpu)
    except KeyError:
        return None  # an architecture that names its dimensions differently


def _online_memory(
    config: Mapping[str, Any],
    training: Settings,
    policy: ModelMemory,
    reward: Mapping[str, Any] | None,
    gpu: int | None,
) -> RankMemory:
    """Add up policy, critic, reference, the reward model of config `reward`, and the engine."""
    sizes, online = Sizes.of(config), Online.of(training.online)
    models, item, on_gpu = [policy], ITEM[training.dtype], gpu is not None
    if ALGORITHMS[training.objective].critic:
        critic = estimate(config, training, gpu=on_gpu, critic=True)
        if online.loop.critic == "shared":  # an adapter on the policy's trunk
            critic = replace(critic, weights=sizes.adapter_weights(training.peft) * item)
        models.append(critic)
    frozen = 0
    measured = online.loop.kl_coef > 0 or online.loop.kl_limit is not None
    if training.peft.kind == "none" and measured:
        divided = training.world_size if training.zero.stage == 3 else 1
        frozen += sizes.weights() * item // divided  # the reference
    if reward is not None:
        dtype = str(reward.get("dtype") or "bfloat16")
        frozen += replace(Sizes.of(reward), tied=True).weights() * ITEM.get(dtype, 2)
    rollout, share = online.rollout, 1.0
    if rollout.engine != "vllm":  # on a CPU each rank has a share of the servers
        share = 0.0 if on_gpu else (rollout.servers or 0) / training.launch.nproc
    engine = rollout_memory(config, asdict(rollout), training.dtype, gpu_bytes=gpu)
    awake = asleep = int(engine.weights * share) + int(engine.cache * share)
    host = sum(model.host for model in models)
    if on_gpu and share:
        awake, asleep = awake + LIBRARIES, ASLEEP
        # Without an adapter the next sync brings all weights.
        host += engine.weights if goes_as_adapter(training) else 0
    states = sum(model.states for model in models)
    lasting = sum(model.weights for model in models) + states + frozen
    resident = lasting
    if on_gpu and rollout.offload_trainer:
        resident, host = resident - states, host + states
    forward = max(model.forward for model in models)
    peaks = {
        "rollout": resident + max(awake, asleep + forward),
        "train": lasting + asleep + max(m.gradients + m.activations for m in models),
    }
    least = lasting + asleep + max(model.gradients for model in models)
    return RankMemory(peaks, max(peaks["rollout"], least), host)


def problems(context: Context) -> Iterator[Finding]:
    """Yield what does not fit into the memory of this machine."""
    settings = context.settings
    rank = memory_of(settings, rewarded=context.rewarded)
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
    config, rollout, smoke = context.known.config, settings["rollout"], settings["smoke"]
    if context.online and not rollout["urls"]:
        engine = rollout_memory(config, rollout, settings["model"]["dtype"], gpu_bytes=gpu)
        key, needed = "rollout.kv_cache_gib", str(-(-engine.longest // GIB))
        if gpu is not None:
            used = engine.weights + engine.longest + LIBRARIES
            key, needed = "rollout.gpu_memory", f"{math.ceil(100 * used / gpu) / 100:g}"
        yield from cache_fits(engine, key, f"{key}={needed}")
    gpu = machine.gpu_memory()
    gpus = machine.gpu_count() if gpu is not None else None
    sharing = smoke["tensor_parallel"] if smoke["engine"] != "transformers" else 1
    if wrong := list(shareable("smoke.tensor_parallel", sharing, config, gpus=gpus)):
        yield from wrong
        return
    engine = engine_memory(config, settings, gpu_bytes=gpu)
    more = f"smoke.kv_cache_gib={-(-engine.longest // GIB)}"
    more = more if gpu is None else "smoke.tensor_parallel=<GPUs>"
    yield from cache_fits(engine, "memory of smoke_eval", f"{more} or smoke.max_model_len=<tokens>")


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


def cache_fits(engine: EngineMemory, key: str, override: str) -> Iterator[Finding]:
    """Check that the KV cache holds one sequence of full length, which vLLM needs to start."""
    if engine.longest > engine.cache:
        value = f"{engine.cache / GIB:.1f} GiB for keys and values"
        allowed = f"one sequence of {engine.context} tokens needs {engine.longest / GIB:.1f} GiB"
        yield Finding(key, value, allowed, override)


def shareable(
    key: str, processes: int, config: Mapping[str, Any], *, gpus: int | None = None
) -> Iterator[Finding]:
    """Check that processes can share a model: vLLM divides its attention heads.

    `gpus` is the number of visible GPUs if each process needs one of its own.
    """
    heads = (config.get("text_config") or config).get("num_attention_heads") or 0
    if gpus and processes > gpus:
        allowed = f"a GPU for each process, and {gpus} {'is' if gpus == 1 else 'are'} visible"
        yield Finding(key, str(processes), allowed, f"{key}={gpus}")
    elif heads % processes:
        most = math.gcd(heads, processes)
        allowed = f"a divisor of the model's {heads} attention heads"
        yield Finding(key, str(processes), allowed, f"{key}={most}")
