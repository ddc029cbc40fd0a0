"""Casts between bf16, fp16 and fp32 with numpy alone, bit for bit as torch casts on a CPU.

A plan that only copies and casts then needs no torch, whose import costs more than a second and
200 MB. bf16 is the upper half of an fp32; rounding is to the nearest, ties to even. A NaN stays a
NaN, with a payload of its own: torch's own payloads depend on where in a vector the NaN stood.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

NUMPY = ("BF16", "F16", "F32")
"""dtypes (safetensors names) that are cast here; others take torch."""
_WORDS = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}


def casts(source: str, target: str) -> bool:
    """Whether this pair of dtypes is cast here."""
    return source in NUMPY and target in NUMPY


def cast(raw: NDArray[np.uint8], source: str, target: str) -> NDArray[np.uint8]:
    """The same numbers in another dtype.

    Args:
        raw: bytes of elements of dtype `source`, 1-D.
        source: safetensors name.
        target: safetensors name.

    Returns:
        bytes of as many elements of dtype `target`, 1-D. Too large numbers become infinite.
    """
    wide = _to_f32(raw, source)
    if target == "F32":
        return wide.view(np.uint8)
    if target == "BF16":
        return _round_bf16(wide).view(np.uint8)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return wide.astype(np.float16).view(np.uint8)


def _to_f32(raw: NDArray[np.uint8], source: str) -> NDArray[Any]:
    words = raw.view(_WORDS[source])
    if source == "F32":
        return words
    if source == "BF16":
        return (words.astype(np.uint32) << 16).view(np.float32)
    return words.astype(np.float32)


def _round_bf16(wide: NDArray[Any]) -> NDArray[np.uint16]:
    bits = wide.view(np.uint32)
    lowest = (bits >> 16) & 1
    lowest += 0x7FFF
    lowest += bits
    lowest >>= 16
    found = lowest.astype(np.uint16)
    odd = np.isnan(wide)
    if odd.any():
        found[odd] = _NAN
    return found


_NAN = 0x7FC0
"""The quiet NaN without payload."""
