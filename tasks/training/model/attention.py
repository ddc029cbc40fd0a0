"""Block-diagonal attention over a packed row, by transformers' own SDPA on one bucket at a time.

The same on CPUs and GPUs, with nothing but torch: on a GPU every call takes torch's flash kernel,
since there is no mask. flash-attn, where it is installed and asked for, takes a row in one call.
Sequences of similar length share a call (`packing.Bucket`); padding exists inside of it alone, and
causal attention keeps it out of sight of every real token. Work is the sum of squares of the
sequences' lengths, where a masked call over the row would take the square of the row's.
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
"""Tokens up to which the CPU's plain attention beats its flash attention, whose backward pass in
bf16 takes seven times as long on sequences of 40 tokens. Longer ones need its thrift."""


def register() -> str:
    """Make `packed_sdpa` known to transformers; its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_sdpa)
    return NAME


def flash_bounds(row: Row) -> dict[str, Any]:
    """Return what transformers' flash attention needs to keep the sequences of a row apart.

    Without these it derives them from the positions in every layer, and waits for the GPU each time
    (`modeling_flash_attention_utils._is_packed_sequence` of transformers 5.19).
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
    """Causal attention within each sequence.

    Args:
        module: the attention layer.
        query: (1, heads, T, d).
        key: (1, key heads, T, d).
        value: (1, key heads, T, d_v).
        attention_mask: what the model made; None, since there is no mask under this name.
        buckets: of the row; None for one sequence that has the row to itself.
        sliding_window: tokens that each sees, itself included. Families that put it into their
            mask alone leave it out; the layer's configuration then has it.
        kwargs: passed on to transformers' SDPA.

    Returns:
        (1, T, heads, d_v), and None for the attention weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seen = sliding_window or _configured_window(module)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        length = q.shape[2]
        mask = _window(length, seen, q.device)
        with _kernel(q, length):
            out, _ = sdpa_attention_forward(module, q, k, v, mask, **kwargs)
        return out

    if buckets is None:
        return call(query, key, value), None
    # split, not slices: its backward pass is one concatenation, where every slice's is a row of
    # zeros and a sum.
    counts = [bucket.count for bucket in buckets]
    states = zip(*(x[0].split(counts, dim=1) for x in (query, key, value)), strict=True)
    parts = [
        _scatter(call(*(_gather(x, bucket) for x in each)), bucket)
        for bucket, each in zip(buckets, states, strict=True)
    ]
    return (torch.cat(parts) if len(parts) > 1 else parts[0])[None], None


def _gather(states: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """(h, t, d) -> (n, h, L, d)."""
    heads, _, width = states.shape
    flat = states if bucket.gather is None else states.index_select(1, bucket.gather)
    return flat.reshape(heads, -1, bucket.length, width).transpose(0, 1)


def _scatter(out: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """(n, L, h, d) -> (t, h, d), without the places that are padding."""
    flat = out.reshape(-1, *out.shape[2:])
    return flat if bucket.scatter is None else flat.index_select(0, bucket.scatter)


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


def _kernel(query: torch.Tensor, length: int) -> contextlib.AbstractContextManager[None]:
    if query.device.type == "cpu" and length <= SHORT:
        return sdpa_kernel(SDPBackend.MATH)
    return contextlib.nullcontext()
