"""Find NaN, infinity and zeros in raw tensor bytes, with numpy alone.

Gathering moves bytes and never computes with them, so it needs no torch; bf16 has no numpy type.
A floating-point number is not finite exactly if all its exponent bits are set, and zero exactly if
every bit but the sign is clear.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 18
"""Bytes at a time: temporaries of this size stay in the CPU cache."""

_FLOATS: dict[str, tuple[str, int, int]] = {
    # name: (unsigned type of the same width, exponent mask, mask of all bits but the sign)
    "F64": ("<u8", 0x7FF0_0000_0000_0000, 0x7FFF_FFFF_FFFF_FFFF),
    "F32": ("<u4", 0x7F80_0000, 0x7FFF_FFFF),
    "F16": ("<u2", 0x7C00, 0x7FFF),
    "BF16": ("<u2", 0x7F80, 0x7FFF),
}


def is_float(dtype: str) -> bool:
    """Return True if `dtype` (a safetensors name) is F64, F32, F16 or BF16."""
    return dtype in _FLOATS


def nonfinite(raw: NDArray[np.uint8], dtype: str) -> int:
    """Count the elements that are infinite or NaN. Integer tensors have none.

    Args:
        raw: the tensor's bytes, 1-D.
        dtype: its safetensors name.
    """
    if dtype not in _FLOATS:
        return 0
    word, exponent, magnitude = _FLOATS[dtype]
    count = 0
    for part in _chunks(raw, word):
        size = part & np.array(magnitude, part.dtype)
        if size.max(initial=0) >= exponent:  # a maximum is cheaper than a count
            count += int(np.count_nonzero(size >= exponent))
    return count


def largest(raw: NDArray[np.uint8], dtype: str) -> int:
    """Return the largest magnitude of a float tensor, as its bits without the sign.

    Bits order as magnitudes do. Infinity and NaN count as larger than every number. `magnitude`
    turns the bits into a number.

    Args:
        raw: the tensor's bytes, 1-D.
        dtype: its safetensors name, a float (`is_float`).

    Returns:
        the bits; 0 if every element is zero or the tensor is empty.
    """
    word, _, bits = _FLOATS[dtype]
    return max(
        (int((part & np.array(bits, part.dtype)).max(initial=0)) for part in _chunks(raw, word)),
        default=0,
    )


def magnitude(bits: int, dtype: str) -> float:
    """Return the number for the bits that `largest` returned; may be NaN or infinite."""
    if dtype == "BF16":
        bits, dtype = bits << 16, "F32"
    word = _FLOATS[dtype][0]
    return float(np.array(bits, word).view(word.replace("u", "f")))


def all_zero(raw: NDArray[np.uint8], dtype: str) -> bool:
    """Return True if every element is zero or minus zero, or if the tensor is empty."""
    if dtype not in _FLOATS:
        return not raw.any()
    word, _, magnitude = _FLOATS[dtype]
    return not any((part & np.array(magnitude, part.dtype)).any() for part in _chunks(raw, word))


def _chunks(raw: NDArray[np.uint8], word: str) -> list[NDArray[Any]]:
    # _CHUNK is a multiple of every item size, so every chunk can be viewed as words.
    return [raw[at : at + _CHUNK].view(word) for at in range(0, raw.size, _CHUNK)]
