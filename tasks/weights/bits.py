"""Questions about raw tensor bytes, answered with numpy alone.

Gathering moves bytes and never computes with them, so it needs no torch; bf16 has no numpy type.
A floating-point number is not finite exactly when all its exponent bits are set, and zero exactly
when every bit but the sign is clear.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 18
"""Bytes at a time: temporaries of this size stay in the cache, and need no fresh pages."""

_FLOATS: dict[str, tuple[str, int, int]] = {
    # name: (unsigned type of the same width, exponent mask, everything but the sign)
    "F64": ("<u8", 0x7FF0_0000_0000_0000, 0x7FFF_FFFF_FFFF_FFFF),
    "F32": ("<u4", 0x7F80_0000, 0x7FFF_FFFF),
    "F16": ("<u2", 0x7C00, 0x7FFF),
    "BF16": ("<u2", 0x7F80, 0x7FFF),
}


def is_float(dtype: str) -> bool:
    """Whether `dtype` (a safetensors name) is one of the IEEE-like floats handled here."""
    return dtype in _FLOATS


def nonfinite(raw: NDArray[np.uint8], dtype: str) -> int:
    """How many elements are infinite or NaN. Integer tensors have none.

    Args:
        raw: the tensor's bytes, 1-D.
        dtype: its safetensors name.
    """
    if dtype not in _FLOATS:
        return 0
    word, exponent, magnitude = _FLOATS[dtype]
    found = 0
    for part in _chunks(raw, word):
        size = part & np.array(magnitude, part.dtype)
        if size.max(initial=0) >= exponent:  # the largest number tells whether to count at all
            found += int(np.count_nonzero(size >= exponent))
    return found


def all_zero(raw: NDArray[np.uint8], dtype: str) -> bool:
    """Whether every element is zero (minus zero counts as zero). True for an empty tensor."""
    if dtype not in _FLOATS:
        return not raw.any()
    word, _, magnitude = _FLOATS[dtype]
    return not any((part & np.array(magnitude, part.dtype)).any() for part in _chunks(raw, word))


def _chunks(raw: NDArray[np.uint8], word: str) -> list[NDArray[Any]]:
    # Views only: a list of them costs nothing, and a chunk is a multiple of every item size.
    return [raw[at : at + _CHUNK].view(word) for at in range(0, raw.size, _CHUNK)]
