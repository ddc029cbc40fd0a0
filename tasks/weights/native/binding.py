"""Load the compiled kernels and call them on numpy arrays."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.weights.native.compiled import compiled

# No fused multiply-add: product, scale and sum are rounded one by one, as in torch.
FLAGS = ("-ffp-contract=off",)
MAX_RANK = 384
"""Largest rank that `fold` supports; the same number is in `fold.c`. Up to this rank MKL sums in
order on Intel CPUs, as the kernel does (measured for ranks 1 to 1024; on AMD CPUs up to 192)."""


class Library:
    """Compiled kernels. Calls release the interpreter's lock.

    Args:
        kernels: the loaded shared library.
    """

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self._library = kernels
        size, address = ctypes.c_size_t, ctypes.c_void_p
        self._declare("round_bf16", None, address, address, size)
        self._declare("widen_bf16", None, address, address, size)
        folded = [address] * 4 + [ctypes.c_int] + [size] * 3 + [ctypes.c_float, address]
        self._declare("fold_bf16", ctypes.c_int, *folded)

    def _declare(self, name: str, result: Any, *arguments: Any) -> None:
        function = getattr(self._library, name)
        function.restype, function.argtypes = result, arguments

    def fold(
        self,
        base: NDArray[np.uint16],
        out: NDArray[np.uint16],
        *,
        a: NDArray[Any],
        b: NDArray[np.float32],
        scale: float,
    ) -> tuple[int, int]:
        """Compute `out = bf16(base + scale * (b @ a))`.

        Args:
            base: rows of a bf16 matrix as 16-bit words, shape (rows, columns).
            out: result in the same form; overwritten.
            a: shape (rank, columns), contiguous, in fp32 or as 16-bit words of bf16; rank at most
                `MAX_RANK`.
            b: shape (rows, rank).
            scale: factor of the product.

        Returns:
            Number of changed elements, and number of elements of `out` that are not finite.
        """
        counts: NDArray[np.int64] = np.zeros(2, np.int64)
        sizes = (base.shape[0], base.shape[1], b.shape[1])
        matrices = (_at(base), _at(out), _at(b), _at(a), int(a.dtype.itemsize == 2))
        assert self._library.fold_bf16(*matrices, *sizes, scale, _at(counts)), "no such kernel"
        return int(counts[0]), int(counts[1])

    def round_bf16(self, wide: NDArray[np.float32], out: NDArray[np.uint16]) -> None:
        """Round fp32 to the 16 bits of bf16: to nearest, ties to even; NaN becomes 0x7FC0."""
        self._library.round_bf16(_at(wide), _at(out), wide.size)

    def widen_bf16(self, narrow: NDArray[np.uint16], out: NDArray[np.float32]) -> None:
        """Convert the 16 bits of bf16 to fp32, exactly."""
        self._library.widen_bf16(_at(narrow), _at(out), narrow.size)

    @property
    def folds(self) -> bool:
        """True if `fold` supports this CPU."""
        nothing: NDArray[np.uint64] = np.zeros(64, np.uint64)
        where = [_at(nothing)] * 4
        return bool(self._library.fold_bf16(*where, 0, 0, 0, 0, 0.0, _at(nothing)))


def _at(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


@cache
def library() -> Library | None:
    """Return the kernels; None if they cannot be compiled, which is logged."""
    here = Path(__file__).parent
    kernels = compiled([here / "fold.c"], *FLAGS, slower="merging LoRA is slower")
    return None if kernels is None else Library(kernels)
