"""Loading the kernels, and calling them on numpy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.weights.native.compiled import compiled

SOURCES = ("sha256_lanes.c", "fold.c")
# No contraction: a product, a scale and a sum are three roundings, as torch makes them.
FLAGS = ("-ffp-contract=off",)
MAX_RANK = 384
"""Largest rank that is folded: up to here MKL sums the rank in one chain on Intel's CPUs, as the
kernel does (measured for ranks 1 to 1024; on AMD's up to 192); as in `fold.c`."""


class Library:
    """The compiled kernels. Calls release the interpreter's lock.

    Args:
        kernels: the shared object.
    """

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self._library = kernels
        size, address = ctypes.c_size_t, ctypes.c_void_p
        self._declare("sha256_update", None, size, address, address, address)
        self._declare("round_bf16", None, address, address, size)
        self._declare("widen_bf16", None, address, address, size)
        folded = [address] * 4 + [ctypes.c_int] + [size] * 3 + [ctypes.c_float, address]
        self._declare("fold_bf16", ctypes.c_int, *folded)

    def _declare(self, name: str, result: Any, *arguments: Any) -> None:
        function = getattr(self._library, name)
        function.restype, function.argtypes = result, arguments

    def sha256_update(
        self, states: Sequence[NDArray[np.uint32]], data: Sequence[NDArray[np.uint8]]
    ) -> None:
        """Advance SHA-256 states, (8,) each, by messages of whole 64-byte blocks."""
        count = len(states)
        addresses = ctypes.c_void_p * count
        self._library.sha256_update(
            count,
            addresses(*map(_at, states)),
            addresses(*map(_at, data)),
            (ctypes.c_size_t * count)(*(one.size // 64 for one in data)),
        )

    def fold(
        self,
        base: NDArray[np.uint16],
        out: NDArray[np.uint16],
        *,
        a: NDArray[Any],
        b: NDArray[np.float32],
        scale: float,
    ) -> tuple[int, int]:
        """`out = bf16(base + scale * (b @ a))`.

        Args:
            base: rows of a bf16 matrix as 16-bit words, (rows, columns).
            out: likewise, to be filled.
            a: (rank, columns), contiguous, in fp32 or as bf16's 16 bits; rank up to MAX_RANK.
            b: (rows, rank).
            scale: of the product.

        Returns:
            how many elements changed, and how many of `out` are not finite.
        """
        found: NDArray[np.int64] = np.zeros(2, np.int64)
        sizes = (base.shape[0], base.shape[1], b.shape[1])
        matrices = (_at(base), _at(out), _at(b), _at(a), int(a.dtype.itemsize == 2))
        assert self._library.fold_bf16(*matrices, *sizes, scale, _at(found)), "no such kernel"
        return int(found[0]), int(found[1])

    def round_bf16(self, wide: NDArray[np.float32], out: NDArray[np.uint16]) -> None:
        """bf16's 16 bits of every number, to nearest, ties to even; NaN is 0x7FC0."""
        self._library.round_bf16(_at(wide), _at(out), wide.size)

    def widen_bf16(self, narrow: NDArray[np.uint16], out: NDArray[np.float32]) -> None:
        """fp32 of every number that bf16's 16 bits are, exactly."""
        self._library.widen_bf16(_at(narrow), _at(out), narrow.size)

    @property
    def folds(self) -> bool:
        """Whether `fold` exists for this CPU."""
        nothing: NDArray[np.uint64] = np.zeros(64, np.uint64)
        where = [_at(nothing)] * 4
        return bool(self._library.fold_bf16(*where, 0, 0, 0, 0, 0.0, _at(nothing)))


def _at(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


@cache
def library() -> Library | None:
    """The kernels; None where they cannot be compiled, which is logged."""
    here = Path(__file__).parent
    slower = "hashing and folding take the slower way"
    found = compiled([here / name for name in SOURCES], *FLAGS, slower=slower)
    return None if found is None else Library(found)
