"""Sequence parallelism (Ulysses): N ranks share a row, each with N-th part of its tokens.

Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509. Every layer but attention computes each
token by itself. For attention an all-to-all exchanges tokens for heads, so that each rank has all
tokens of an N-th of the heads; a second one exchanges them back. The exchange is DeepSpeed's
operator. Its own `UlyssesSPAttentionHF` is not used: it changes the model's layers, which also
compute whole sequences here (fingerprints), and gathers the positions again in every layer.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tasks.training.model.attention import packed_sdpa
from tasks.training.tokens.packing import Bucket, Row

NAME = "packed_ulysses"


class SequenceParallel:
    """Division of rows over the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        from deepspeed.sequence.layer import register_all_to_all_group

        register_all_to_all_group(group)
        self._group = group
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)

    def register(self) -> str:
        """Register the attention with transformers; return its name."""
        from transformers import AttentionInterface

        AttentionInterface.register(NAME, self.attention)
        return NAME

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
        heads, key_heads = query.shape[1], key.shape[1]
        repeated = math.lcm(key_heads, self._size)
        layer: Any = module
        if repeated > key_heads:
            key, value = (x.repeat_interleave(repeated // key_heads, dim=1) for x in (key, value))
            layer = SimpleNamespace(
                config=getattr(module, "config", None),
                layer_idx=getattr(module, "layer_idx", None),
                num_key_value_groups=heads // repeated,
            )
        query, key, value = (self._to_heads(x) for x in (query, key, value))
        out, _ = packed_sdpa(layer, query, key, value, None, buckets=buckets, **kwargs)
        return self._to_tokens(out), None

    def _to_heads(self, states: torch.Tensor) -> torch.Tensor:
        """Exchange (1, h, T / N, d) for (1, h / N, T, d)."""
        from deepspeed.sequence.layer import _dim_zero_all_to_all

        _, heads, tokens, width = states.shape
        shares = states.reshape(self._size, heads // self._size, tokens, width)
        received: torch.Tensor = _dim_zero_all_to_all(self._group, shares)
        return received.transpose(0, 1).reshape(1, -1, self._size * tokens, width)

    def _to_tokens(self, out: torch.Tensor) -> torch.Tensor:
        """Exchange (1, T, h / N, d) for (1, T / N, h, d)."""
        from deepspeed.sequence.layer import _dim_zero_all_to_all

        _, tokens, heads, width = out.shape
        parts = out.reshape(self._size, tokens // self._size, heads, width)
        received: torch.Tensor = _dim_zero_all_to_all(self._group, parts)
        return received.transpose(0, 1).reshape(1, tokens // self._size, self._size * heads, width)

    def _bounds(self, row: Row) -> tuple[int, int]:
        each = -(-row.ids.shape[1] // self._size)
        return self._rank * each, (self._rank + 1) * each

    def _mine(self, row: Row, places: torch.Tensor) -> torch.Tensor:
        """Return the indices of those places that lie in this rank's part."""
        first, end = self._bounds(row)
        return ((places >= first) & (places < end)).nonzero()[:, 0]
