"""Estimated memory of a training rank, from the model's `config.json`. Knows no torch.

`Sizes` has the dimensions of a decoder; `estimate` adds up weights, gradients, optimizer states
(Rajbhandari et al. 2020, "ZeRO", divided over the ranks from the stage that partitions them) and
activations of the longest row. Imported libraries, about `LIBRARIES`, are not included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tasks.config.defaults import ONLINE, PAIRS
from tasks.drift.fingerprint import EXPERTS
from tasks.training.engine.zero_config import accumulates_in_fp32
from tasks.training.job import Settings

ITEM = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a number, by dtype."""
LIBRARIES = 2**30
"""Bytes of a rank before it loads a model, at most."""
PORTION = 1 << 25
"""Largest number of logits that exist at a time (`model/head.py`)."""
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss")
"""Families of experts whose dimensions are read here."""
_ADAPTED = ("mixtral", "qwen3_moe", "olmoe")
"""Families whose experts and routers peft 0.21 adapts for `all-linear`."""
_GATHERED = 10**9
"""Most weights that ZeRO-3 keeps gathered (`stage3_max_live_parameters`)."""
_SCALE = {True: 1.03 / 64, False: 4 / 64}
"""Bytes of quantisation scale per 4-bit weight, with and without double quantisation."""

Maps = dict[str, tuple[int, int]]
"""Linear maps of a layer: (in, out) by module name."""


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a decoder, without towers for images and sound.

    Attributes:
        inner: width of all feed-forward blocks that a token passes through.
        tied: True if the output head is the input embedding.
        layouts: kinds of layers: how many there are, and their linear maps.
        cached: layers with keys and values.
        experts: weights of experts and routers; no linear maps, so QLoRA leaves them in 16 bits.
        expert_pairs: weights of a LoRA of rank 1 on all experts and routers; 0 if peft adapts none.
        embeddings: weights of embeddings that each layer has of its own (Gemma 4).
    """

    hidden: int
    inner: int
    layers: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    layouts: tuple[tuple[int, Maps], ...]
    cached: int
    experts: int = 0
    expert_pairs: int = 0
    embeddings: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Sizes:
        """Read them from the contents of `config.json`.

        Raises:
            KeyError: the family names its dimensions differently.
        """
        text = config.get("text_config") or config
        hidden, layers, heads = (
            text[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
        kv_heads = text.get("num_key_value_heads") or heads
        head_dim = text.get("head_dim") or hidden // heads
        recurrent = text.get("model_type") == "qwen3_5_text"
        query = heads * head_dim
        attention = {
            "q_proj": (hidden, 2 * query if recurrent else query),  # with a gate in Qwen3.5
            "k_proj": (hidden, kv_heads * head_dim),
            "v_proj": (hidden, kv_heads * head_dim),
            "o_proj": (query, hidden),
        }
        dense = {**attention, **_feed_forward(hidden, text["intermediate_size"])}
        more: dict[str, Any] = {"layouts": ((layers, dense),), "cached": layers}
        if recurrent:
            more |= _recurrent(text, dense)
        if experts_of(text) > 1:
            more |= _mixture(text, attention, dense)
        width, rows = (
            text.get(name) or 0
            for name in ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
        )
        fields = {
            "inner": text["intermediate_size"],
            "embeddings": layers * width * (rows + 3 * hidden),
            "tied": bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            **more,
        }
        return cls(
            hidden=hidden, layers=layers, vocab=text["vocab_size"], heads=heads,
            kv_heads=kv_heads, head_dim=head_dim, **fields,
        )  # fmt: skip

    def linear_weights(self) -> int:
        """Return the number of weights in the linear maps of all layers."""
        return sum(n * sum(i * o for i, o in maps.values()) for n, maps in self.layouts)

    def weights(self) -> int:
        """Return the number of weights of a causal model, without biases."""
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        norms = self.hidden * (2 * self.layers + 1)
        return self.linear_weights() + tables + norms + self.embeddings + self.experts

    def kv_cache(self, tokens: int, item: int = 2) -> int:
        """Return the bytes of keys and values of `tokens` tokens, at `item` bytes per number."""
        return 2 * self.cached * self.kv_heads * self.head_dim * tokens * item


def experts_of(text: Mapping[str, Any]) -> int:
    """Return the number of experts in a layer, from a decoder's `config.json`; 0 without any."""
    nested = text.get("ffn_config") or {}  # of DBRX
    return max(of.get(name) or 0 for of in (text, nested) for name in EXPERTS)


def _feed_forward(hidden: int, width: int) -> Maps:
    up = {"gate_proj": (hidden, width), "up_proj": (hidden, width)}
    return {**up, "down_proj": (width, hidden)} if width else {}


def _mixture(text: Mapping[str, Any], attention: Maps, dense: Maps) -> dict[str, Any]:
    """Return the fields of a mixture of experts; which layers have any: `Qwen2MoeDecoderLayer`."""
    family, hidden, count = text.get("model_type"), text["hidden_size"], experts_of(text)
    if family not in MIXTURES:
        raise KeyError(f"dimensions as read here: {family} is another mixture of experts")
    step, without = text.get("decoder_sparse_step") or 1, text.get("mlp_only_layers") or ()
    layers = range(text["num_hidden_layers"])
    sparse = sum(layer not in without and (layer + 1) % step == 0 for layer in layers)
    wide = text.get("moe_intermediate_size") or text["intermediate_size"]
    shared = text.get("shared_expert_intermediate_size") or 0
    maps = {**attention, **_feed_forward(hidden, shared)}
    if shared:
        maps["shared_expert_gate"] = (hidden, 1)
    # peft doubles the rank of `gate_up_proj`, which holds two maps.
    pair = count * (2 * (hidden + 2 * wide) + wide + hidden) + hidden + count
    routed = text["num_experts_per_tok"] * wide + shared
    return {
        "layouts": tuple(
            (n, kind) for n, kind in ((len(layers) - sparse, dense), (sparse, maps)) if n
        ),
        "inner": max(routed, text["intermediate_size"] if sparse < len(layers) else 0),
        "experts": sparse * hidden * (3 * count * wide + count),
        "expert_pairs": sparse * pair if family in _ADAPTED else 0,
    }


def _recurrent(text: Mapping[str, Any], dense: Maps) -> dict[str, Any]:
    """Return the fields of a model with gated linear attention (`Qwen3_5GatedDeltaNet`)."""
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = heads * text["linear_value_head_dim"]
    number = (text.get("layer_types") or ()).count("linear_attention")
    maps = {
        "in_proj_qkv": (hidden, 2 * keys + values),
        "in_proj_z": (hidden, values),
        "in_proj_b": (hidden, heads),
        "in_proj_a": (hidden, heads),
        "out_proj": (values, hidden),
        **_feed_forward(hidden, text["intermediate_size"]),
    }
    full = text["num_hidden_layers"] - number
    return {"layouts": ((full, dense), (number, maps)), "cached": full}


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one rank for one model, in bytes.

    Attributes:
        weights: stored weights, and those that ZeRO-3 gathers for a pass.
        states: master weights and moments.
        gradients: gradients with their bucket, and in fp32 for the optimizer step.
        activations: activations and logits of the longest row, in training.
        forward: the same in a pass without gradients.
        host: states and weights offloaded from a GPU; not part of the fields above.
    """

    weights: int
    states: int
    gradients: int
    activations: int
    forward: int
    host: int = 0

    @property
    def lasting(self) -> int:
        """Memory between steps."""
        return self.weights + self.states

    @property
    def total(self) -> int:
        """Peak memory with the longest samples."""
        return self.lasting + self.gradients + self.activations


def estimate(
    config: Mapping[str, Any], settings: Settings, *, gpu: bool = False, critic: bool = False
) -> MemoryEstimate:
    """Estimate the peak memory of one rank for one model.

    Args:
        config: contents of the base's `config.json`.
        settings: settings of the run.
        gpu: True if the rank computes on a GPU: offloaded states are then in host memory.
        critic: True for a separate critic, which contains the policy's head and does not train it.

    Raises:
        KeyError: the family names its dimensions differently.
    """
    sizes, zero, peft = Sizes.of(config), settings.zero, settings.peft
    item, ranks = ITEM[settings.dtype], settings.world_size
    scored = critic or settings.objective == "reward"
    headless = replace(sizes, tied=True) if scored else sizes  # a score head is a vector
    stored = sizes if critic else headless
    trained = headless.weights() if peft.kind == "none" else adapter_weights(headless, settings)
    over = {stage: ranks if zero.stage >= stage else 1 for stage in (1, 2, 3)}

    weights = stored.weights() * item
    if peft.kind == "qlora":
        weights -= int(stored.linear_weights() * (item - 0.5 - _SCALE[peft.double_quant]))
    if peft.kind != "none":
        weights += trained * item
    weights //= over[3]
    gathered = min(stored.weights(), _GATHERED) * item if over[3] > 1 else 0

    moments = 8.0 if settings.optim.optimizer == "adamw" else 2 * (1 + 4 / 256)
    master = 0 if settings.dtype == "float32" else 4
    optimizer = int(trained / over[1] * (master + moments))
    summed = ITEM["float32"] if accumulates_in_fp32(settings, ranks) else item
    bucket = zero.bucket_size if gpu else min(trained, zero.bucket_size)
    gradients = trained * summed // over[2] + (bucket * item if zero.stage else 0)
    gradients += trained // over[1] * 4  # in fp32, during the step

    kept, forward = _activations(headless, settings, item, logits=not scored)
    host = 0
    if gpu and zero.offload_optimizer == "cpu":
        host, optimizer = optimizer, 0
    if gpu and zero.offload_param == "cpu":
        host, weights = host + weights, 0
    return MemoryEstimate(weights + gathered, optimizer, gradients, kept, forward, host)


def adapter_weights(sizes: Sizes, settings: Settings) -> int:
    """Return the trained weights of an adapter: LoRA pairs, DoRA's magnitudes, whole tables."""
    peft, everything = settings.peft, isinstance(settings.peft.target_modules, str)
    ranks = peft.rank_pattern or {}
    experts = sizes.expert_pairs if everything else 0
    pairs = peft.rank * experts
    for count, maps in sizes.layouts:
        targets = set(maps) if everything else set(peft.target_modules)
        targets -= {"gate_proj", "up_proj", "down_proj"} if experts else set()
        for name in targets & set(maps) - set(peft.exclude_modules):
            width, out = maps[name]
            pairs += count * ranks.get(name, peft.rank) * (width + out)
            pairs += count * out if peft.use_dora else 0
    whole = sum(name in ("embed_tokens", "lm_head") for name in peft.modules_to_save)
    return pairs + whole * sizes.vocab * sizes.hidden


def longest(settings: Settings) -> int:
    """Return the tokens of the longest sequence: `train.max_len`, or a prompt and a response."""
    if settings.objective not in ONLINE or not settings.online:
        return settings.batch.max_len
    rollout = settings.online["rollout"]
    return int(rollout["max_prompt_len"] + rollout["max_new_tokens"])


def _activations(sizes: Sizes, settings: Settings, item: int, *, logits: bool) -> tuple[int, int]:
    """Return the bytes of the longest row: kept for the backward pass, and without gradients."""
    peft, hidden = settings.peft, sizes.hidden
    roles = 2 if settings.objective in PAIRS else 1  # chosen and rejected share a row
    tokens = settings.batch.micro_batch_size * longest(settings) * roles
    tokens = -(-tokens // settings.launch.sequence_parallel)
    query = sizes.heads * sizes.head_dim
    # Norms in fp32 and in the model's dtype, attention, gate, its activation, up, their product.
    numbers = 2 * hidden + 4 * query + 4 * sizes.inner
    each = numbers * item + 2 * hidden * 4
    layer = tokens * each
    if peft.kind != "none":
        maps = max((maps for _, maps in sizes.layouts), key=len).values()
        narrow = len(maps) * peft.rank * item
        dropped = sum(width for width, _ in maps) * (item + 1) if peft.dropout else 0
        scaled = sum(2 * width for _, width in maps) * item if peft.use_dora else 0
        layer += tokens * (narrow + dropped + scaled)
        if sizes.expert_pairs and isinstance(peft.target_modules, str):
            # peft computes the sum of a layer's experts and their update, and keeps it.
            layer += 2 * item * sizes.experts // sizes.layers
    layers = sizes.layers * layer
    if settings.gradient_checkpointing:
        layers = sizes.layers * tokens * hidden * item + layer
    trained = peft.kind == "none" or "lm_head" in peft.modules_to_save
    head = min(tokens * sizes.vocab, PORTION) * (12 + item if trained else 4) if logits else 0
    return layers + head, layer + head
