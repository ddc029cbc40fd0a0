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


def largest(raw: NDArray[np.uint8], dtype: str) -> int:
    """The largest magnitude among a float tensor's elements, as its bits without the sign.

    Bits order as magnitudes do; from the exponent mask on they stand for no number. 0 where every
    element is zero, or where there is none. See `magnitude` for the number.

    Args:
        raw: the tensor's bytes, 1-D.
        dtype: its safetensors name; `is_float` says which are known.
    """
    word, _, bits = _FLOATS[dtype]
    return max(
        (int((part & np.array(bits, part.dtype)).max(initial=0)) for part in _chunks(raw, word)),
        default=0,
    )


def magnitude(bits: int, dtype: str) -> float:
    """The number that `largest` gave the bits of; NaN or infinite where they are none."""
    if dtype == "BF16":
        bits, dtype = bits << 16, "F32"
    word = _FLOATS[dtype][0]
    return float(np.array(bits, word).view(word.replace("u", "f")))


def all_zero(raw: NDArray[np.uint8], dtype: str) -> bool:
    """Whether every element is zero (minus zero counts as zero). True for an empty tensor."""
    if dtype not in _FLOATS:
        return not raw.any()
    word, _, magnitude = _FLOATS[dtype]
    return not any((part & np.array(magnitude, part.dtype)).any() for part in _chunks(raw, word))


def _chunks(raw: NDArray[np.uint8], word: str) -> list[NDArray[Any]]:
    # Views only: a list of them costs nothing, and a chunk is a multiple of every item size.
    return [raw[at : at + _CHUNK].view(word) for at in range(0, raw.size, _CHUNK)]
