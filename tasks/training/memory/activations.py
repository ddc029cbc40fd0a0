"""Estimated memory of a forward and backward pass over one packed row. Knows no torch."""

from __future__ import annotations

from typing import NamedTuple

from tasks.config.defaults import ONLINE, PAIRS
from tasks.training.job import Settings
from tasks.training.memory.sizes import Sizes

PORTION = 1 << 25
"""Largest number of logits at a time (`model/head.py`); 128 MiB in fp32."""
SHORT = 256
"""Sequence length up to which a CPU's math kernel, which stores attention probabilities, beats its
flash kernel, whose bf16 backward pass takes seven times as long at 40 tokens. Longer sequences need
the memory that flash saves."""


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
