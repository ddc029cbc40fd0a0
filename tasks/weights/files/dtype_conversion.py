"""Casts between bf16, fp16 and fp32 with numpy alone, bit for bit as torch casts on a CPU.

A plan that only copies and casts then needs no torch, whose import costs more than a second and
200 MB. bf16 is the upper half of an fp32; rounding is to the nearest, ties to even. A NaN stays a
NaN, with a payload of its own: torch's own payloads depend on where in a vector the NaN stood.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.weights.native import library

NUMPY = ("BF16", "F16", "F32")
"""dtypes (safetensors names) that are cast here; others take torch."""
_WORDS = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}


def casts(source: str, target: str) -> bool:
    """Whether this pair of dtypes is cast here."""
    return source in NUMPY and target in NUMPY


def cast(
    raw: NDArray[np.uint8], source: str, target: str, out: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """The same numbers in another dtype.

    Args:
        raw: bytes of elements of dtype `source`, 1-D.
        source: safetensors name.
        target: safetensors name.
        out: memory for the result, of its size; None takes fresh memory.

    Returns:
        bytes of as many elements of dtype `target`, 1-D. Too large numbers become infinite.
    """
    words = raw.view(_WORDS[source])
    found = np.empty(words.size, _WORDS[target]) if out is None else out.view(_WORDS[target])
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for at in range(0, words.size, _CHUNK):
            _cast_chunk(words[at : at + _CHUNK], source, found[at : at + _CHUNK], target)
    return found.view(np.uint8)


def _cast_chunk(words: NDArray[Any], source: str, found: NDArray[Any], target: str) -> None:
    if source == "BF16" and target == "F32":
        _widen_bf16(words, found)
    elif target != "BF16":
        wide = cast(words.view(np.uint8), source, "F32") if source == "BF16" else words
        found[...] = wide.view(np.float32) if source == "BF16" else wide
    elif source == "BF16":
        found[...] = words
    else:
        _round_bf16(words.astype(np.float32, copy=False), found)


def _widen_bf16(words: NDArray[np.uint16], found: NDArray[np.float32]) -> None:
    kernels = library()
    if kernels is not None:
        kernels.widen_bf16(words, found)
    else:
        np.left_shift(words, 16, out=found.view(np.uint32), dtype=np.uint32)


def _round_bf16(wide: NDArray[np.float32], found: NDArray[np.uint16]) -> None:
    kernels = library()
    if kernels is not None:
        kernels.round_bf16(wide, found)
        return
    bits = wide.view(np.uint32)
    raised = bits >> 16
    raised &= 1
    raised += 0x7FFF
    raised += bits
    found[...] = raised.view(np.uint16)[_UPPER::2]
    odd = np.isnan(wide)
    if odd.any():
        found[odd] = _NAN


_CHUNK = 1 << 16
"""Elements at a time: temporaries of this size stay in the cache, and need no fresh pages."""
_UPPER = 1 if sys.byteorder == "little" else 0
_NAN = 0x7FC0
"""The quiet NaN without payload."""
