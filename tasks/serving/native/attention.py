"""Loading the kernel, and calling it on tensors."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from tasks.compiled import compiled

DIM, STEP = 256, 32
"""A head's numbers at most, and what they and a block's tokens are multiples of. As in
`attention.c`."""
FORMATS = (torch.bfloat16, torch.float32)


class Cache(ctypes.Structure):
    """Where keys and values of a layer lie, and how they are asked for."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        ("per_block", ctypes.c_size_t),
        ("tokens", ctypes.c_size_t),
        ("heads", ctypes.c_size_t),
        ("group", ctypes.c_size_t),
        ("dim", ctypes.c_size_t),
        ("scale", ctypes.c_float),
        ("bf16", ctypes.c_int),
    )

    @classmethod
    def of(cls, tensor: torch.Tensor, heads: int, scale: float) -> Cache | None:
        """None: the kernel does not know such ones.

        Args:
            tensor: (blocks, kv heads, tokens, 2 * dim), each block in one piece; the caller keeps
                it. Its numbers mean something to the kernel only.
            heads: of queries; those that follow each other share keys and values.
            scale: of the products of queries and keys.
        """
        _, kv_heads, tokens, wide = tensor.shape
        dim = wide // 2
        if tensor.dtype not in FORMATS or dim % STEP or dim > DIM or tokens % STEP:
            return None
        if heads % kv_heads or not tensor[0].is_contiguous():
            return None
        per_block, bf16 = tensor.stride(0) * tensor.element_size(), tensor.dtype == FORMATS[0]
        group = heads // kv_heads
        return cls(tensor.data_ptr(), per_block, tokens, kv_heads, group, dim, scale, bf16)


_TYPES = [torch.int32, torch.int32, torch.int32, torch.int64]


class _Batch(ctypes.Structure):
    _fields_ = (
        ("starts", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("longest", ctypes.c_size_t),
    )


@dataclass(frozen=True)
class Batch:
    """Sequences, whose new tokens follow each other.

    Attributes:
        starts: (count + 1,) int32, new tokens before each sequence's.
        lengths: (count,) int32, all tokens of each, of which the new ones are the last.
        blocks: (count, w) int32, of the cache, in the order of their tokens.
        slots: (new tokens,) int64, where each one's key and value are kept: block * tokens + place;
            negative: nowhere.
        longest: new tokens of a sequence, at most.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    blocks: torch.Tensor
    slots: torch.Tensor
    longest: int

    def told(self) -> _Batch:
        """As the kernel is told; these tensors have to be kept."""
        every = (self.starts, self.lengths, self.blocks, self.slots)
        found = [one.dtype for one in every]
        if found != _TYPES:
            raise TypeError(f"a batch of {found}, where the kernel knows {_TYPES}")
        addresses = (one.data_ptr() for one in every)
        return _Batch(*addresses, len(self.lengths), self.blocks.stride(0), self.longest)


class _Rows(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("stride", ctypes.c_size_t))


class AttentionKernel:
    """The compiled kernel."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self._attend = kernels.attend
        self._attend.restype = None
        self._attend.argtypes = [ctypes.c_void_p] * 2 + [_Rows] * 4

    def attend(
        self,
        cache: Cache,
        batch: _Batch,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Keep the new tokens' keys and values, then attend, each to itself and what is before it.

        Args:
            cache: of the layer.
            batch: of `Batch.told`.
            query: (new tokens, heads, dim), heads of a token in one piece, like all below.
            key: (new tokens, kv heads, dim).
            value: (new tokens, kv heads, dim).
            out: (new tokens, heads, dim), to be filled.
        """
        every = (_rows(query), _rows(key), _rows(value), _rows(out))
        self._attend(ctypes.byref(cache), ctypes.byref(batch), *every)


def _rows(tensor: torch.Tensor) -> _Rows:
    if tensor.stride(2) != 1 or tensor.stride(1) != tensor.shape[2]:
        raise ValueError(f"heads of a token are not in one piece: strides {tensor.stride()}")
    return _Rows(tensor.data_ptr(), tensor.stride(0) * tensor.element_size())


@cache
def attention_kernel() -> AttentionKernel | None:
    """The kernel; None where it cannot be compiled, which is logged."""
    source = Path(__file__).with_name("attention.c")
    found = compiled([source], "-fopenmp", slower="rollouts attend by vLLM's kernel")
    return None if found is None else AttentionKernel(found)
