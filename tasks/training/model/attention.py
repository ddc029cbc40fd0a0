"""Block-diagonal attention over a packed row: transformers' own SDPA, one bucket at a time.

It needs only torch, on CPUs and GPUs; on a GPU every call runs torch's flash kernel, since there is
no mask. (flash-attn, if configured, processes a row in one call.) Sequences of similar length
share a call (`packing.Bucket`). Only these calls have padding, behind the real tokens, where causal
attention hides it. The cost is the sum of the squared sequence lengths, not the squared length of
the row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tasks.training.tokens.packing import Bucket, Row

NAME = "packed_sdpa"
SHORT = 256
"""Sequence length up to which a CPU's math kernel beats its flash kernel, whose bf16 backward pass
takes seven times as long at 40 tokens. Longer sequences need the memory that flash saves."""


def register() -> str:
    """Register `packed_sdpa` with transformers; return its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_sdpa)
    return NAME


def flash_bounds(row: Row) -> dict[str, Any]:
    """Return the arguments by which transformers' flash attention keeps sequences of a row apart.

    Without them it derives the bounds from the positions in every layer, with a GPU synchronisation
    each time (`modeling_flash_attention_utils._is_packed_sequence` of transformers 5.19).
    """
    longest = row.buckets[-1].length
    return {
        "cu_seq_lens_q": row.bounds,
        "cu_seq_lens_k": row.bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def packed_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    buckets: Sequence[Bucket] | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each sequence of a packed row.

    Args:
        module: the attention layer.
        query: (1, heads, T, d).
        key: (1, key heads, T, d).
        value: (1, key heads, T, d_v).
        attention_mask: unused; transformers makes no mask for this attention.
        buckets: buckets of the row; None if the row is a single sequence.
        sliding_window: number of tokens that each token sees, itself included. None for families
            that only put it into their mask; it is then read from the layer's configuration.
        kwargs: passed on to transformers' SDPA.

    Returns:
        (1, T, heads, d_v), and None for the attention weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seen = sliding_window or _configured_window(module)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        short = q.device.type == "cpu" and q.shape[2] <= SHORT
        mask = _window(q.shape[2], seen, q.device)
        with sdpa_kernel(SDPBackend.MATH) if short else contextlib.nullcontext():
            out, _ = sdpa_attention_forward(module, q, k, v, mask, **kwargs)
        return out

    if buckets is None:
        return call(query, key, value), None
    # split, because its backward pass is one concatenation; a slice's is a row of zeros and a sum.
    counts = [bucket.count for bucket in buckets]
    states = zip(*(x[0].split(counts, dim=1) for x in (query, key, value)), strict=True)
    parts = []
    for bucket, each in zip(buckets, states, strict=True):
        out = call(*(_gather(x, bucket) for x in each))
        flat = out.reshape(-1, *out.shape[2:])  # (n, L, h, d) -> (t, h, d), without padding
        parts.append(flat if bucket.scatter is None else flat.index_select(0, bucket.scatter))
    return (torch.cat(parts) if len(parts) > 1 else parts[0])[None], None


def _gather(states: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """Pad a bucket: (h, t, d) -> (n, h, L, d)."""
    heads, _, width = states.shape
    flat = states if bucket.gather is None else states.index_select(1, bucket.gather)
    return flat.reshape(heads, -1, bucket.length, width).transpose(0, 1)


def _configured_window(module: torch.nn.Module) -> int | None:
    config = getattr(module, "config", None)
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is None or kinds is None:
        return window
    return window if kinds[module.layer_idx] == "sliding_attention" else None


def _window(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    if not window or length <= window:
        return None
    place = torch.arange(length, device=device)
    back = place[:, None] - place[None]
    return ((back >= 0) & (back < window))[None, None]
