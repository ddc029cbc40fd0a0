"""Bytes a rank needs to train, by arithmetic on the model's `config.json`. Knows no torch.

The accounting of mixed-precision AdamW under ZeRO (Rajbhandari et al., 2020, "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models"): 16-bit weights and gradients, fp32 master
weights and two fp32 moments, each divided over the ranks from the stage on that partitions it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.training.job import Settings

_BYTES = {"bfloat16": 2, "float32": 4}
_NF4_BYTES = {True: 0.5 + 1.03 / 64, False: 0.5 + 4 / 64}
"""A weight in NF4 with one scale for 64 weights, the scales themselves quantised or in fp32."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank's device, or in its host memory where offloaded."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a decoder. D hidden, F intermediate, L layers, V vocabulary."""

    hidden: int
    intermediate: int
    layers: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Sizes:
        """From the contents of `config.json`."""
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            vocab=config["vocab_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    def linears(self) -> dict[str, tuple[int, int]]:
        """(in, out) of every linear map of one layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, q),
            "k_proj": (self.hidden, kv),
            "v_proj": (self.hidden, kv),
            "o_proj": (q, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    def linear_weights(self) -> int:
        """Weights in all layers' linear maps."""
        return self.layers * sum(i * o for i, o in self.linears().values())

    def other_weights(self) -> int:
        """Embeddings, output head where it is not tied, norms."""
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        return tables + self.hidden * (2 * self.layers + 1)


def estimate(config: Mapping[str, Any], settings: Settings, world_size: int) -> MemoryEstimate:
    """What one of `world_size` ranks needs at its peak.

    Activations are those of one micro-batch of `max_len` tokens: what every layer keeps for its
    backward pass (its input alone with gradient checkpointing, and one layer's recomputation), and
    the logits with their gradient in fp32.
    """
    sizes, zero, peft = Sizes.of(config), settings.zero, settings.peft
    item = _BYTES[settings.dtype]
    total = sizes.linear_weights() + sizes.other_weights()
    trained = total if peft.kind == "none" else adapter_weights(sizes, settings)
    frozen_linear = _NF4_BYTES[peft.double_quant] if peft.kind == "qlora" else item
    held = sizes.linear_weights() * frozen_linear + sizes.other_weights() * item
    if peft.kind != "none":
        held += trained * item
    shared = {stage: world_size if zero.stage >= stage else 1 for stage in (1, 2, 3)}
    master = 12 if settings.dtype == "bfloat16" else 8  # fp32 weights need no master copy
    return MemoryEstimate(
        parameters=int(held / shared[3]),
        gradients=int(trained * item / shared[2]),
        optimizer=int(trained * master / shared[1]),
        activations=_activations(sizes, settings, item),
    )


def adapter_weights(sizes: Sizes, settings: Settings) -> int:
    """Weights of the LoRA matrices: rank x (in + out) for every targeted linear map."""
    targets, linears = settings.peft.target_modules, sizes.linears()
    chosen = (
        linears if isinstance(targets, str) else {n: linears[n] for n in targets if n in linears}
    )
    return sizes.layers * settings.peft.rank * sum(i + o for i, o in chosen.values())


def _activations(sizes: Sizes, settings: Settings, item: int) -> int:
    tokens = settings.batch.micro_batch_size * settings.batch.max_len
    # Kept for backward: two normed inputs, their sources, q, k, v, attention's output, three of the
    # gated MLP. An adapter keeps the low-rank activation of each linear map besides.
    linears = sizes.linears()
    width = 4 * sizes.hidden + sum(linears[n][1] for n in ("q_proj", "k_proj", "v_proj"))
    width += linears["o_proj"][0] + 3 * sizes.intermediate
    if settings.peft.kind != "none":
        width += settings.peft.rank * len(linears)
    layer = tokens * width * item
    if settings.gradient_checkpointing:
        kept = sizes.layers * tokens * sizes.hidden * item + layer
    else:
        kept = sizes.layers * layer
    return kept + tokens * sizes.vocab * (item + 8)
