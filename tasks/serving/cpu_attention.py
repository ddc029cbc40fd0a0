"""Attention of vLLM's engine on a CPU: one kernel of our own, that reads keys and values once.

vLLM 0.32 reads them once for every head of queries unless their number for a head of keys is a
power of two, and has two calls a layer: one to keep them, in columns, a cache line for each number,
one to attend. Here that is one call (`native/attention.c`).
"""

from __future__ import annotations

BACKEND = "tasks.serving.vllm_attention.KernelBackend"


def use_attention_kernel() -> None:
    """Have models that vLLM loads in this process from now on attend by the kernel.

    Not where the kernel cannot be compiled, and not on CPUs with AMX, for which vLLM has another
    way than the one that this was measured against.
    """
    import torch
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from tasks.serving.native.attention import attention_kernel

    if torch.cpu._is_amx_tile_supported() or attention_kernel() is None:
        return
    register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
