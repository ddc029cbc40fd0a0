"""Estimated memory of a training rank, from the model's `config.json`. Knows no torch.

Mixed-precision AdamW under ZeRO (Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models") has 16-bit weights and gradients, fp32 master weights and two
fp32 moments, each divided over the ranks from the stage that partitions it. Buffers of DeepSpeed
0.19, torch 2.13 and gloo are added, as found in their source.

The memory of imported libraries, about `LIBRARIES`, is not included, nor what a host's malloc keeps
of freed memory: on a CPU the resident memory is larger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tasks.config.defaults import ONLINE, PAIRS
from tasks.training.engine.zero_config import accumulates_in_fp32
from tasks.training.job import Settings
from tasks.training.memory.sizes import Sizes

ITEM = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a number, by dtype."""
LIBRARIES = 2**30
"""Bytes of a rank before it loads a model: 0.47 GiB on a CPU, about 1 GiB with a GPU context."""
_SCALE_BYTES = {True: 1.03 / 64, False: 4 / 64}
"""Bytes of quantisation scale per 4-bit weight, with and without double quantisation."""
_PARTS = (
    "weights", "gathered", "gradients", "optimizer", "activations", "logits", "step",
    "communication",
)  # fmt: skip
_MAX_LIVE = 10**9
"""Most elements that ZeRO-3 keeps gathered (`stage3_max_live_parameters`)."""
_SUB_GROUP = 10**9
"""Weights of a rank that ZeRO-3 updates at a time (`sub_group_size`)."""
_GLOO_THREADS = 2
"""Concurrent collectives of gloo, each with a flat copy of the gathered tensors."""
_ALLREDUCE = 500_000_000
"""Gradient elements that ZeRO-0 flattens at a time (`MEMORY_OPT_ALLREDUCE_SIZE`)."""

PORTION = 1 << 25
"""Largest number of logits at a time (`model/head.py`); 128 MiB in fp32."""
SHORT = 256
"""Sequence length up to which a CPU's math kernel, which stores attention probabilities, beats its
flash kernel, whose bf16 backward pass takes seven times as long at 40 tokens. Longer sequences need
the memory that flash saves."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one rank, in bytes.

    Attributes:
        weights: weights stored by this rank.
        gathered: weights that ZeRO-3 gathers for a pass.
        gradients: gradients and the bucket that they are reduced in.
        optimizer: master weights and moments.
        activations: activations of the longest row, logits left out.
        logits: logits of one portion of tokens, and their gradients.
        step: temporary tensors of the optimizer step: gradients in fp32, and copies.
        communication: flat buffers of collectives.
        released: part of the gradients that is freed before the step copies weights.
        host: states offloaded from a GPU to the host; not part of the fields above.
        mapped: part of `weights` on a CPU that is a mapped file, shared by all ranks of a node.
        forward: memory of a pass without gradients; not part of the fields above.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int = 0
    logits: int = 0
    step: int = 0
    communication: int = 0
    released: int = 0
    host: int = 0
    mapped: int = 0
    forward: int = 0

    @property
    def states(self) -> int:
        """Memory that is needed however short the samples are."""
        return self.lasting + max(self.step, self.communication + self.released)

    @property
    def total(self) -> int:
        """Peak memory with the longest samples: of a pass, a step or a collective."""
        row = max(self.activations + self.logits, self.communication)
        return self.lasting + max(row + self.released, self.step)

    @property
    def lasting(self) -> int:
        """Memory between passes, gathered weights included."""
        weights = self.weights + self.gathered
        return weights + self.gradients - self.released + self.optimizer

    def parts(self) -> dict[str, int]:
        """Return bytes by name. They do not all exist at the same time: `total` is less."""
        return {name: getattr(self, name) for name in _PARTS if getattr(self, name)}


def estimate(
    config: Mapping[str, Any],
    settings: Settings,
    world_size: int,
    *,
    gpu: bool = False,
    critic: bool = False,
) -> MemoryEstimate:
    """Estimate the peak memory of one of `world_size` ranks for one model.

    Args:
        config: contents of the base's `config.json`.
        settings: settings of the run.
        world_size: number of ranks.
        gpu: True if the rank computes on a GPU. A CPU stores attention probabilities of short
            sequences, and computes 16-bit products in fp32.
        critic: True for the separate critic of a policy with these settings. It contains the
            policy's output head and does not train it.

    Raises:
        KeyError: the architecture names its dimensions differently.
    """
    sizes, zero, item = Sizes.of(config), settings.zero, ITEM[settings.dtype]
    logits = not critic and settings.objective != "reward"
    headless = sizes if logits else replace(sizes, tied=True)  # a score head is a vector
    sizes = sizes if critic else headless
    trained = trained_weights(headless, settings)
    shared = {stage: world_size if zero.stage >= stage else 1 for stage in (1, 2, 3)}
    weights = _weight_bytes(sizes, settings, gpu=gpu) / shared[3]
    gathered = min(sizes.weights(), _MAX_LIVE) * item if shared[3] > 1 else 0
    row = row_bytes(sizes, settings, item=item, gpu=gpu, logits=logits)
    mine = trained / shared[1]
    offloaded = zero.offload_optimizer == "cpu"
    at_once = mine if zero.stage < 3 else min(mine, _SUB_GROUP)
    grad_item = ITEM["float32"] if accumulates_in_fp32(settings, world_size) else item
    states, step = (
        mine * _optimizer_bytes(settings),
        at_once * _step_bytes(settings, grad_item, gpu=gpu),
    )
    if offloaded:
        states += mine * item  # the updated weights, before they are copied to the device
    gradients = int(trained * grad_item / shared[2] + _bucket(settings, trained, gpu=gpu))
    away = (states + step if offloaded else 0) + (weights if zero.offload_param == "cpu" else 0)
    return MemoryEstimate(
        weights=int(0 if gpu and zero.offload_param == "cpu" else weights),
        gathered=gathered,
        gradients=gradients,
        optimizer=int(0 if gpu and offloaded else states),
        activations=row.activations,
        logits=row.logits,
        step=int(0 if gpu and offloaded else step),
        communication=int(_communication(settings, trained, gathered, world_size, gpu=gpu)),
        # Only stages 1 and 2 free gradients before the step, after a copy to fp32.
        released=gradients if zero.stage in (1, 2) else 0,
        host=int(away) if gpu else 0,
        mapped=0 if gpu else int(_mapped(sizes, settings)),
        forward=row.forward,
    )


def on_node(size: int, mapped: int, ranks: int) -> int:
    """Return the bytes of all ranks of a node, libraries included.

    Args:
        size: bytes of one rank.
        mapped: part of `size` that all ranks share, pages of a mapped file.
        ranks: number of ranks on the node.
    """
    return ranks * (size - mapped + LIBRARIES) + mapped


def trained_weights(sizes: Sizes, settings: Settings) -> int:
    """Return the number of trained weights."""
    full = settings.peft.kind == "none"
    return sizes.weights() if full else adapter_weights(sizes, settings)


def _weight_bytes(sizes: Sizes, settings: Settings, *, gpu: bool) -> float:
    """Return the bytes of all weights, before ZeRO-3 partitions them."""
    peft, item = settings.peft, ITEM[settings.dtype]
    linear = item if peft.kind != "qlora" else 0.5 + _SCALE_BYTES[peft.double_quant]
    size = sizes.linear_weights() * linear + sizes.other_weights() * item
    if peft.kind != "none":
        size += adapter_weights(sizes, settings) * item
    if peft.kind == "qlora" and not gpu:
        # The quantised file stays mapped as long as one of its tensors is in use.
        size += sizes.weights() * item
    return size


def _mapped(sizes: Sizes, settings: Settings) -> int:
    """Return the bytes of a CPU's weights that ranks share as a mapped file; 0 without QLoRA.

    Without QLoRA each rank has its own copy: DeepSpeed broadcasts rank 0's weights into privately
    mapped memory (`_broadcast_model`), and ZeRO-3 makes partitions.
    """
    return sizes.weights() * ITEM[settings.dtype] if settings.peft.kind == "qlora" else 0


def _bucket(settings: Settings, trained: int, *, gpu: bool = False) -> int:
    """Return the bytes of the buffer in which gradients are reduced.

    DeepSpeed always allocates all of it; a CPU does not touch the pages that are not used.
    """
    zero = settings.zero
    buffers = 2 if gpu and zero.stage in (1, 2) and zero.overlap_comm else 1
    bucket = buffers * zero.bucket_size if gpu else min(trained, zero.bucket_size)
    return bucket * ITEM[settings.dtype] if zero.stage else 0


def _communication(
    settings: Settings, trained: int, gathered: int, ranks: int, *, gpu: bool
) -> float:
    """Return the largest size of the collectives' flat buffers, in bytes.

    ZeRO-3 prefetches weights bucket by bucket, up to `_MAX_LIVE` elements, each bucket in a flat
    buffer from which the weights are then copied.
    """
    item, zero = ITEM[settings.dtype], settings.zero
    if ranks == 1:
        return 0
    if zero.stage == 0:
        return min(trained, _ALLREDUCE) * item
    if zero.stage < 3:
        return _bucket(settings, trained)
    copies = 0 if gpu else min(gathered, _GLOO_THREADS * zero.bucket_size * item)
    return max(gathered + copies, 2 * _bucket(settings, trained))


def _optimizer_bytes(settings: Settings) -> float:
    """Return the bytes per trained weight of the fp32 master copy (16-bit dtypes) and moments."""
    master = 0 if settings.dtype == "float32" else 4
    moments = 8.0 if settings.optim.optimizer == "adamw" else 2 * (1 + 4 / 256)
    return master + moments


def _step_bytes(settings: Settings, item: int, *, gpu: bool) -> int:
    """Return the temporary bytes per trained weight in an optimizer step.

    The gradient in fp32 takes 4. From stage 1 on all weights of a rank are one flat tensor, for
    which torch's AdamW on a CPU also makes the root of the second moment, with and without bias
    correction. The fused, the 8-bit and the offloaded AdamW work in place.
    """
    unfused = settings.optim.optimizer == "adamw" and not gpu
    in_place = not unfused or settings.zero.offload_optimizer == "cpu"
    if gpu and settings.zero.stage in (1, 2):
        return 4 + item  # of the gradients, from which it is copied
    return 4 if in_place or settings.zero.stage == 0 else 12


def adapter_weights(sizes: Sizes, settings: Settings, *, tables: bool = True) -> int:
    """Return the number of trained weights of an adapter.

    They are LoRA pairs of rank x (in + out) weights, DoRA's magnitudes, pairs for every expert,
    and embeddings or head in `modules_to_save`.

    Args:
        sizes: dimensions of the model.
        settings: settings of the run.
        tables: False to leave out `modules_to_save`.
    """
    peft = settings.peft
    ranks = peft.rank_pattern or {}
    pairs, everything = 0, isinstance(peft.target_modules, str)
    if everything and sizes.adapted:
        # peft doubles the rank of `gate_up_proj`, which holds two maps.
        wide, experts = sizes.expert_width, sizes.experts
        stacked = 2 * (sizes.hidden + 2 * wide) + wide + sizes.hidden
        router = sizes.hidden + experts
        pairs = sizes.sparse_layers * peft.rank * (experts * stacked + router)
    for count, linears in sizes.layouts():
        targets = set(linears) if everything else {*peft.target_modules}
        if everything and sizes.adapted:
            targets -= {"gate_proj", "up_proj", "down_proj"}
        chosen = {n: linears[n] for n in targets if n in linears and n not in peft.exclude_modules}
        pairs += count * sum(
            ranks.get(name, peft.rank) * (i + o) + (o if peft.use_dora else 0)
            for name, (i, o) in chosen.items()
        )
    whole = sum(name in ("embed_tokens", "lm_head") for name in peft.modules_to_save)
    return pairs + (whole * sizes.vocab * sizes.hidden if tables else 0)


class RowBytes(NamedTuple):
    """Bytes of a pass over one row: of the head, of all else, and of a pass without gradients."""

    logits: int
    activations: int
    forward: int


def row_bytes(
    sizes: Sizes, settings: Settings, *, item: int, gpu: bool, logits: bool = True
) -> RowBytes:
    """Return the bytes of the longest row: a micro-batch of examples of the greatest length.

    Args:
        sizes: dimensions of the model.
        settings: settings of the run.
        item: bytes of a number in the model's dtype.
        gpu: True if the rank computes on a GPU.
        logits: False for a score or value head.
    """
    roles = 2 if settings.objective in PAIRS else 1  # chosen and rejected share a row
    # Ranks that share a row have an equal part of its tokens, or all tokens of a part of the heads.
    tokens = settings.batch.micro_batch_size * longest(settings) * roles
    tokens = -(-tokens // settings.launch.sequence_parallel)
    layer = int(tokens * _layer(sizes, settings, item=item, gpu=gpu))
    peft = settings.peft
    if sizes.adapted and peft.kind != "none" and isinstance(peft.target_modules, str):
        # peft computes the sum of a layer's experts and their update, and keeps it.
        layer += 2 * 3 * sizes.experts * sizes.hidden * sizes.expert_width * item
    layers = sizes.layers * layer
    if settings.gradient_checkpointing:
        layers = sizes.layers * tokens * sizes.hidden * item + layer
    head = _head(sizes, settings, tokens, item) if logits else 0
    if not gpu and item < 4:
        layers += _through_fp32(sizes, settings, tokens, logits)
    return RowBytes(head, layers, layer + head)


def longest(settings: Settings) -> int:
    """Return the tokens of the longest sequence: `train.max_len`, or a prompt and a response."""
    if settings.objective not in ONLINE or not settings.online:
        return settings.batch.max_len
    rollout = settings.online["rollout"]
    return int(rollout["max_prompt_len"] + rollout["max_new_tokens"])


def _layer(sizes: Sizes, settings: Settings, *, item: int, gpu: bool) -> float:
    """Return the bytes per token that a layer keeps for its backward pass."""
    hidden, inner, query = sizes.hidden, sizes.inner, sizes.query
    full = settings.peft.kind == "none"
    # A norm keeps its input in fp32 and its output; a trained one its normalised input, too.
    norms = 2 * hidden * (4 + item + (item if full else 0))
    length = longest(settings)
    if not gpu and length <= SHORT and settings.attn_implementation == "sdpa":
        attention = 3 * query * 4 + sizes.heads * length * 4 + query * item
    else:
        attention = 4 * query * item
    mlp = 4 * inner * item  # gate, its activation, up, their product
    # Each token is copied for each of its experts, and their results are weighted.
    routed = 3 * sizes.top_k * hidden * item
    return norms + attention + mlp + routed + _adapter(sizes, settings, item)


def _adapter(sizes: Sizes, settings: Settings, item: int) -> int:
    """Return the bytes per token that the adapters of one layer keep for the backward pass."""
    peft = settings.peft
    if peft.kind == "none":
        return 0
    linears = max((maps for _, maps in sizes.layouts()), key=len).values()
    narrow = len(linears) * peft.rank * item
    dropped = sum(width for width, _ in linears) * (item + 1) if peft.dropout else 0
    # DoRA's gradient needs the base's output and the adapter's.
    scaled = sum(2 * width for _, width in linears) * item if peft.use_dora else 0
    return narrow + dropped + scaled


def _head(sizes: Sizes, settings: Settings, tokens: int, item: int) -> int:
    """Return the bytes of the head's tensors.

    A trained head has log-softmax, its gradient and the gradient of the logits in fp32, and the
    last in the model's dtype, too. A frozen head has logits and gradients of the hidden states.
    """
    logits = min(tokens * sizes.vocab, PORTION)
    if settings.peft.kind == "none" or "lm_head" in settings.peft.modules_to_save:
        return logits * (12 + item)
    return logits * 4 + tokens * sizes.hidden * item


def _through_fp32(sizes: Sizes, settings: Settings, tokens: int, logits: bool) -> int:
    """Return the bytes of a CPU's fp32 operands: of a layer's largest map, and a trained head."""
    weight = 4 * max(i * o for _, maps in sizes.layouts() for i, o in maps.values())
    table = 8 * sizes.vocab * sizes.hidden if settings.peft.kind == "none" and logits else 0
    return weight + 4 * tokens * (sizes.hidden + sizes.inner) + table
