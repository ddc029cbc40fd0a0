"""vLLM's attention on CPUs with our kernel. It is imported by vLLM, by its name, and imports vLLM.

The kernel knows what most models have: each token looks at all before it. Layers with windows, caps
on scores, sinks and the like go vLLM's way, call by call.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
)

from tasks.serving.native.attention import Batch, Cache, attention_kernel


class KernelBackend(CPUAttentionBackend):
    """In the place of vLLM's own."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """What a layer has."""
        return KernelAttention


class KernelAttention(CPUAttentionBackendImpl):
    """Attention of a layer: by the kernel, or by vLLM's, for as long as its cache lives.

    Both keep keys and values in the same place, and each in an order of its own.
    """

    _of: torch.Tensor | None = None
    _cache: Cache | None = None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As vLLM's, and keys and values are kept before."""
        if attn_metadata is None:  # while it warms up
            return output
        if self._of is not kv_cache:
            self._cache = self._known(layer, query, kv_cache, attn_metadata)
            self._of = kv_cache
        if self._cache is not None:
            self._attend(self._cache, query, key, value, attn_metadata, output)
            return output
        if key is not None and self.kv_sharing_target_layer_name is None:
            slots = attn_metadata.slot_mapping
            self.do_kv_cache_update(layer, key, value, kv_cache, slots)
        more = (attn_metadata, output, output_scale, output_block_scale)
        return super().forward(layer, query, key, value, kv_cache, *more)

    def _known(
        self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, batch: CPUAttentionMetadata
    ) -> Cache | None:
        """None: not by the kernel."""
        others = get_forward_context().no_compile_layers.values()
        plain = (
            self.attn_type == AttentionType.DECODER
            and self.alibi_slopes is None
            and self.sinks is None
            and self.logits_soft_cap == 0
            and self.sliding_window == -1
            and batch.causal
            and query.dtype == kv_cache.dtype
            and layer.head_size_v == layer.head_size
            # A layer that reads another one's cache may be of the other kind.
            and not any(getattr(one, "kv_sharing_target_layer_name", None) for one in others)
        )
        return Cache.of(kv_cache, self.num_heads, self.scale) if plain else None

    def _attend(
        self,
        cache: Cache,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: CPUAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        kernel = attention_kernel()
        if kernel is None or not batch.causal:
            raise NotImplementedError(
                "attention: this layer keeps keys and values as our kernel does, which is for "
                "tokens that look back, and a batch came whose tokens look ahead too; "
                "set rollout.engine=transformers"
            )
        told = batch.__dict__.get("told")  # of all layers of a step
        if told is None:
            told = batch.__dict__["told"] = Batch(
                batch.query_start_loc,
                batch.seq_lens,
                batch.block_table,
                batch.slot_mapping,
                batch.max_query_len,
            ).told()
        kernel.attend(cache, told, query, key, value, output)
