"""A kernel in C for an adapter's part of a rollout on CPUs (`adapter.c`), compiled on first use."""

from tasks.serving.native.binding import AdapterKernel, adapter_kernel

__all__ = ["AdapterKernel", "adapter_kernel"]
