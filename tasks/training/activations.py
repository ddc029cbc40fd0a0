"""What a pass over one packed row keeps in memory, by arithmetic. Knows no torch."""

from __future__ import annotations

from tasks.training.job import Settings
from tasks.training.sizes import Sizes

PORTION = 1 << 25
"""Logits that exist at once (`head.py`)."""
SHORT = 256
"""Tokens up to which a CPU keeps attention's probabilities (`attention.py`)."""
_HOLES = 1.15
"""What the host's allocator cannot give to others between pieces that are kept; measured."""
_LOGITS = 14
"""Bytes of a logit of a head that is trained: 16 bits, fp32, log-softmax, and two gradients."""


def kept_by_a_row(sizes: Sizes, settings: Settings, *, item: int, gpu: bool) -> int:
    """Bytes of the longest row: a micro-batch of examples of `max_len` tokens each."""
    batch = settings.batch
    roles = 1 if settings.objective == "sft" else 2  # chosen and rejected are of one row
    tokens = batch.micro_batch_size * batch.max_len * roles
    layer = tokens * _layer(sizes, settings, item=item, gpu=gpu)
    if settings.gradient_checkpointing:
        layers = sizes.layers * tokens * sizes.hidden * item + layer
    else:
        layers = sizes.layers * layer
    head = 0 if settings.objective == "reward" else _head(sizes, settings, tokens, item)
    if gpu:
        return int(layers + head)
    return int(_HOLES * (layers + head + _through_fp32(sizes, settings, tokens, item)))


def _layer(sizes: Sizes, settings: Settings, *, item: int, gpu: bool) -> float:
    """Bytes a token that a layer keeps for its backward pass."""
    hidden, inner, query = sizes.hidden, sizes.intermediate, sizes.query
    full = settings.peft.kind == "none"
    # A norm: its input in fp32, its output for the maps behind it; trained, the part before its
    # weight as well.
    norms = 2 * hidden * (4 + item + (item if full else 0))
    length = settings.batch.max_len
    if not gpu and length <= SHORT and settings.attn_implementation == "sdpa":
        attention = 3 * query * 4 + sizes.heads * length * 4 + query * item
    else:
        attention = 4 * query * item
    mlp = 4 * inner * item  # gate, its activation, up, their product
    return norms + attention + mlp + _adapter(sizes, settings, item, gpu=gpu)


def _adapter(sizes: Sizes, settings: Settings, item: int, *, gpu: bool) -> int:
    """Bytes a token that the adapters of one layer keep: their narrow part, and of dropout."""
    peft = settings.peft
    if peft.kind == "none":
        return 0
    linears = sizes.linears().values()
    narrow = len(linears) * peft.rank * item
    dropped = sum(width for width, _ in linears) * (item + 1) if peft.dropout else 0
    # DoRA scales the base's output and its own by the magnitude, and needs both for its gradient.
    scaled = sum(2 * width for _, width in linears) * item if peft.use_dora else 0
    # Its own product, which is added to the base's and gone; on the host its place stays taken.
    product = 0 if gpu else sum(width for _, width in linears) * item
    return narrow + dropped + scaled + product


def _head(sizes: Sizes, settings: Settings, tokens: int, item: int) -> int:
    """Bytes of logits, or of the gradients that a frozen head makes of them."""
    logits = min(tokens * sizes.vocab, PORTION)
    if settings.peft.kind == "none" or "lm_head" in settings.peft.modules_to_save:
        return logits * _LOGITS
    return logits * 4 + tokens * sizes.hidden * item


def _through_fp32(sizes: Sizes, settings: Settings, tokens: int, item: int) -> int:
    """Operands of one linear map widened to fp32: the largest of a layer, or a trained head."""
    if item == 4:
        return 0
    full = settings.peft.kind == "none"
    layer = sizes.hidden * sizes.intermediate + tokens * (sizes.hidden + sizes.intermediate)
    head = 2 * sizes.vocab * sizes.hidden if full and settings.objective != "reward" else 0
    return 4 * max(layer, head)
