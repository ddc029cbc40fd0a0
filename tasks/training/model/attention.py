"""Block-diagonal attention over a packed row: transformers' own SDPA, one bucket at a time.

It needs only torch, on CPUs and GPUs; on a GPU every call runs torch's flash kernel, since there is
no mask. (flash-attn, if configured, processes a row in one call.) Sequences of similar length
share a call (`rows.Bucket`). Only these calls have padding, behind the real tokens, where causal
attention hides it. The cost is the sum of the squared sequence lengths, not the squared length of
the row. `SequenceParallel` divides rows over ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_to_all_single
from torch.nn.attention import SDPBackend, sdpa_kernel

from tasks.training.tokens.rows import Bucket, Row

NAME, SHARED = "packed_sdpa", "packed_ulysses"
SHORT = 256
"""Sequence length up to which a CPU's math kernel beats its flash kernel, whose bf16 backward pass
takes seven times as long at 40 tokens. Longer sequences need the memory that flash saves."""


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

    `query`, `key` and `value` are (1, heads, T, d); the result is (1, T, heads, d_v), and None for
    the attention weights. Without `buckets` the row is a single sequence. `sliding_window` is the
    number of tokens that each token sees, itself included; families that only put it into their
    mask do not give it, and it is read from the layer's configuration. transformers makes no mask
    for this attention.
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


class SequenceParallel:
    """Division of rows over the N ranks of a group, each with an N-th of a row's tokens (Ulysses).

    Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509. Every layer but attention computes
    each token by itself. For attention an all-to-all exchanges tokens for heads, so that each rank
    has all tokens of an N-th of the heads; a second one exchanges them back. DeepSpeed's own
    `UlyssesSPAttentionHF` is not used: it changes the model's layers, which also compute whole
    sequences here (fingerprints), and gathers the positions again in every layer.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)

    def part(self, row: Row) -> Row:
        """Return a row of this rank's tokens, and their targets; `buckets` are of the whole row.

        A row whose length is not a multiple of N gets up to N - 1 tokens at its end. They are a
        sequence of their own, without loss. Targets were chosen from the whole row, so the last
        token of a part has the first of the next one as its target.
        """
        first, end = self._bounds(row)
        more = -row.ids.shape[1] % self._size
        filler = torch.arange(more, device=row.ids.device)[None]
        ids = torch.cat([row.ids, torch.zeros_like(filler)], dim=1)
        positions = torch.cat([row.positions, filler], dim=1)
        wanted, ends = self._mine(row, row.wanted), self._mine(row, row.ends)
        return replace(
            row,
            ids=ids[:, first:end],
            positions=positions[:, first:end],
            wanted=row.wanted[wanted] - first,
            targets=row.targets[wanted],
            ends=row.ends[ends] - first,
            buckets=(*row.buckets, Bucket(None, None, more, more)) if more else row.buckets,
        )

    def join(self, row: Row, places: torch.Tensor, results: torch.Tensor) -> torch.Tensor:
        """Return the results at `places` (N,) of all ranks, in the order of the whole row.

        Gradients flow to this rank's own `results` (n,). All ranks compute the same loss from the
        same numbers, so each adds the gradient of its own tokens, and the sum over ranks is
        complete.
        """
        mine = torch.zeros(len(places), dtype=results.dtype, device=results.device)
        return self.total(mine.index_put((self._mine(row, places),), results))

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over the ranks of the group, with the gradient of `join`."""
        summed = values.detach().clone()
        dist.all_reduce(summed, group=self._group)
        return summed + (values - values.detach())

    def real_tokens(self, row: Row) -> int:
        """Return how many of this rank's tokens belong to the row; those behind fill it up."""
        first, end = self._bounds(row)
        return max(0, min(end, row.ids.shape[1]) - first)

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        buckets: tuple[Bucket, ...] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute `packed_sdpa` of a row whose tokens are divided over the ranks.

        Without `buckets` every rank has the same whole sequence, and nothing is exchanged. A key
        head that several ranks need is repeated.
        """
        if buckets is None:
            return packed_sdpa(module, query, key, value, attention_mask, **kwargs)
        _, heads, tokens, _ = query.shape
        key_heads, size = key.shape[1], self._size
        repeated = math.lcm(key_heads, size)
        layer: Any = module
        if repeated > key_heads:
            key, value = (x.repeat_interleave(repeated // key_heads, dim=1) for x in (key, value))
            layer = SimpleNamespace(
                config=getattr(module, "config", None),
                layer_idx=getattr(module, "layer_idx", None),
                num_key_value_groups=heads // repeated,
            )

        def with_all_tokens(states: torch.Tensor) -> torch.Tensor:
            """Exchange (1, h, T / N, d) for (1, h / N, T, d)."""
            width = states.shape[-1]
            received = self._exchange(states.reshape(size, -1, tokens, width))
            return received.transpose(0, 1).reshape(1, -1, size * tokens, width)

        query, key, value = (with_all_tokens(x) for x in (query, key, value))
        out, _ = packed_sdpa(layer, query, key, value, None, buckets=buckets, **kwargs)
        # (1, T, h / N, d) -> (1, T / N, h, d)
        received = self._exchange(out.reshape(size, tokens, heads // size, -1))
        return received.transpose(0, 1).reshape(1, tokens, heads, -1), None

    def _exchange(self, shares: torch.Tensor) -> torch.Tensor:
        """Send share i of (N, ...) to rank i; return those received, in the order of ranks."""
        shares = shares.contiguous()
        received: torch.Tensor = all_to_all_single(
            torch.empty_like(shares), shares, group=self._group
        )
        return received

    def _bounds(self, row: Row) -> tuple[int, int]:
        each = -(-row.ids.shape[1] // self._size)
        return self._rank * each, (self._rank + 1) * each

    def _mine(self, row: Row, places: torch.Tensor) -> torch.Tensor:
        """Return the indices of those places that lie in this rank's part."""
        first, end = self._bounds(row)
        return ((places >= first) & (places < end)).nonzero()[:, 0]
