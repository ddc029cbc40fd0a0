"""Loading the kernel, and calling it on tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from tasks.compiled import compiled

PARTS, RANK = 8, 512
"""Of a layer, at most; ranks are multiples of 8. As in `adapter.c`."""
FORMATS = (torch.bfloat16, torch.float32)

Stacked = Sequence[torch.Tensor]
"""Of each part of a layer's output: (slots, 1, rank, i), or (slots, 1, width, rank)."""


class _Part(ctypes.Structure):
    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("begin", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
    )


class Layer(ctypes.Structure):
    """Where the matrices of a layer's adapter lie, whatever is written there later."""

    _fields_ = (
        ("parts", _Part * PARTS),
        ("count", ctypes.c_size_t),
        ("rank", ctypes.c_size_t),
        ("wide", ctypes.c_size_t),
        ("bf16", ctypes.c_int),
    )

    @classmethod
    def of(
        cls, firsts: Stacked, seconds: Stacked, slot: int, widths: Sequence[int]
    ) -> Layer | None:
        """The adapter in a slot; None: the kernel does not know such ones.

        Args:
            firsts: the first matrices, contiguous; the caller keeps them.
            seconds: the second ones.
            slot: which adapter.
            widths: of the parts, side by side in the layer's output.
        """
        rank, wide = firsts[0].shape[-2:]
        every = (*firsts, *seconds)
        if len({one.dtype for one in every}) > 1 or every[0].dtype not in FORMATS:
            return None
        if rank % 8 or rank > RANK or len(widths) > PARTS:
            return None
        found = cls(count=len(widths), rank=rank, wide=wide, bf16=every[0].dtype == FORMATS[0])
        begin = 0
        for part, (a, b, width) in enumerate(zip(firsts, seconds, widths, strict=True)):
            # Adapter and model may be padded differently.
            there = min(width, b.shape[-2])
            found.parts[part] = _Part(a[slot].data_ptr(), b[slot].data_ptr(), begin, there)
            begin += width
        return found

    def fits(self, x: torch.Tensor, y: torch.Tensor) -> bool:
        """Whether x (rows, i) and y (rows, o) are of its sizes and its number format."""
        last = self.parts[self.count - 1]
        return (
            x.dtype == y.dtype == FORMATS[0 if self.bf16 else 1]
            and x.stride(-1) == y.stride(-1) == 1
            and x.shape[-1] == self.wide
            and y.shape[-1] >= last.begin + last.width
        )


class AdapterKernel:
    """The compiled kernel."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self._add = kernels.add_adapter
        size, address = ctypes.c_size_t, ctypes.c_void_p
        self._add.argtypes = [address, address, size, address, size, size, ctypes.c_float]

    def add(self, layer: Layer, x: torch.Tensor, y: torch.Tensor, scale: float) -> None:
        """Add what the adapter makes of x (rows, i) to y (rows, o), which fit the layer."""
        size = x.element_size()
        given, to = (x.data_ptr(), x.stride(0) * size), (y.data_ptr(), y.stride(0) * size)
        if not self._add(ctypes.byref(layer), *given, *to, len(x), scale):
            raise MemoryError("no memory for the numbers between an adapter's products")


@cache
def adapter_kernel() -> AdapterKernel | None:
    """The kernel; None where it cannot be compiled, which is logged."""
    source = Path(__file__).with_name("adapter.c")
    slower = "rollouts with an adapter take the slower way"
    found = compiled([source], "-fopenmp", slower=slower)
    return None if found is None else AdapterKernel(found)
