"""What a pass over one packed row keeps in memory, by arithmetic. Knows no torch."""

from __future__ import annotations

from typing import NamedTuple

from tasks.config.defaults import ONLINE, PAIRS
from tasks.training.job import Settings
from tasks.training.memory.sizes import Sizes

PORTION = 1 << 25
"""Logits that exist at once (`head.py`)."""
SHORT = 256
"""Tokens up to which a CPU keeps attention's probabilities (`attention.py`)."""
LARGEST_IN_HEAP = 32 << 20
"""Bytes up to which glibc keeps a freed piece in its heap: its threshold for giving memory back
follows the largest piece that was freed, up to this (`DEFAULT_MMAP_THRESHOLD_MAX`)."""


class RowBytes(NamedTuple):
    """Bytes of a pass: in pieces that the host's heap keeps, and in larger ones.

    `recomputed` are the small pieces of all layers that are computed again, one after the other.
    `logits` is the head's part of both; `forward` is what a pass without gradients takes.
    """

    small: int
    large: int
    recomputed: int = 0
    logits: int = 0
    forward: int = 0


def row_bytes(
    sizes: Sizes, settings: Settings, *, item: int, gpu: bool, logits: bool = True
) -> RowBytes:
    """Bytes of the longest row: a micro-batch of examples of the greatest length each.

    Args:
        sizes: of the model.
        settings: what is trained and how.
        item: bytes of a number.
        gpu: True where it is computed on one.
        logits: False for a score or value head.
    """
    roles = 2 if settings.objective in PAIRS else 1  # chosen and rejected are of one row
    tokens = settings.batch.micro_batch_size * longest(settings) * roles
    layer = int(tokens * _layer(sizes, settings, item=item, gpu=gpu))
    piece = tokens * sizes.hidden * item
    recomputed = 0
    if settings.gradient_checkpointing:
        layers = sizes.layers * piece + layer
        recomputed = sizes.layers * layer if piece <= LARGEST_IN_HEAP else 0
    else:
        layers = sizes.layers * layer
    head = _head(sizes, settings, tokens, item) if logits else []
    pieces = [(layers, piece), *head]
    if not gpu and item < 4:
        pieces += _through_fp32(sizes, settings, tokens, logits)
    small = sum(every for every, one in pieces if one <= LARGEST_IN_HEAP)
    large, of_head = sum(every for every, _ in pieces) - small, sum(every for every, _ in head)
    return RowBytes(small, large, recomputed, of_head, layer + of_head)


def longest(settings: Settings) -> int:
    """Tokens of the longest sequence: `train.max_len`, or a prompt and a response."""
    if settings.objective not in ONLINE or not settings.online:
        return settings.batch.max_len
    rollout = settings.online["rollout"]
    return int(rollout["max_prompt_len"] + rollout["max_new_tokens"])


def _layer(sizes: Sizes, settings: Settings, *, item: int, gpu: bool) -> float:
    """Bytes a token that a layer keeps for its backward pass."""
    hidden, inner, query = sizes.hidden, sizes.intermediate, sizes.query
    full = settings.peft.kind == "none"
    # A norm: its input in fp32, its output for the maps behind it; trained, the part before its
    # weight as well.
    norms = 2 * hidden * (4 + item + (item if full else 0))
    length = longest(settings)
    if not gpu and length <= SHORT and settings.attn_implementation == "sdpa":
        attention = 3 * query * 4 + sizes.heads * length * 4 + query * item
    else:
        attention = 4 * query * item
    mlp = 4 * inner * item  # gate, its activation, up, their product
    return norms + attention + mlp + _adapter(sizes, settings, item)


def _adapter(sizes: Sizes, settings: Settings, item: int) -> int:
    """Bytes a token that the adapters of one layer keep: their narrow part, and of dropout."""
    peft = settings.peft
    if peft.kind == "none":
        return 0
    linears = sizes.linears().values()
    narrow = len(linears) * peft.rank * item
    dropped = sum(width for width, _ in linears) * (item + 1) if peft.dropout else 0
    # DoRA scales the base's output and its own by the magnitude, and needs both for its gradient.
    scaled = sum(2 * width for _, width in linears) * item if peft.use_dora else 0
    return narrow + dropped + scaled


def _head(sizes: Sizes, settings: Settings, tokens: int, item: int) -> list[tuple[int, int]]:
    """Bytes of logits, and of the gradients that a frozen head makes of them; in all and in one
    piece. In the backward pass of a head that is trained there are log-softmax, its gradient and
    that of the logits in fp32, and the last in the model's numbers as well.
    """
    logits = min(tokens * sizes.vocab, PORTION)
    if settings.peft.kind == "none" or "lm_head" in settings.peft.modules_to_save:
        return [(logits * 12, logits * 4), (logits * item, logits * item)]
    rows = tokens * sizes.hidden * item
    return [(logits * 4, logits * 4), (rows, rows)]


def _through_fp32(
    sizes: Sizes, settings: Settings, tokens: int, logits: bool
) -> list[tuple[int, int]]:
    """Operands of one linear map widened to fp32, in all and in one piece: of a layer's largest,
    and of a trained head.
    """
    weight = 4 * max(i * o for i, o in sizes.linears().values())
    found = [(weight + 4 * tokens * (sizes.hidden + sizes.intermediate), weight)]
    if settings.peft.kind == "none" and logits:
        table = 4 * sizes.vocab * sizes.hidden
        found.append((2 * table, table))
    return found
