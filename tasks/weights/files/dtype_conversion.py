"""Cast between bf16, fp16 and fp32 with numpy alone, bit for bit as torch does on a CPU.

A plan that only copies and casts then needs no torch, whose import costs more than a second and
200 MB. bf16 is the upper half of an fp32; rounding is to nearest, ties to even. A NaN stays a NaN,
but its payload may differ from torch's, which depends on the NaN's place in a vector.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.weights.native import library

NUMPY = ("BF16", "F16", "F32")
"""dtypes (safetensors names) that this module casts; torch casts all others."""
MANTISSA = {"BF16": 7, "F16": 10, "F32": 23}
"""Explicit mantissa bits by dtype."""
_LEAST = {"BF16": -133, "F16": -24, "F32": -149}
"""Exponent of the smallest positive number by dtype."""
_WORDS = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}


def casts(source: str, target: str) -> bool:
    """Return True if `cast` supports this pair of dtypes."""
    return source in NUMPY and target in NUMPY


def cast(
    raw: NDArray[np.uint8], source: str, target: str, out: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """Cast a tensor to another dtype.

    Args:
        raw: the tensor's bytes, 1-D.
        source: dtype of `raw`, safetensors name.
        target: dtype of the result, safetensors name.
        out: buffer for the result, of its exact size; None allocates one.

    Returns:
        the bytes of the result, 1-D. Numbers too large for `target` become infinite.
    """
    words = raw.view(_WORDS[source])
    result = np.empty(words.size, _WORDS[target]) if out is None else out.view(_WORDS[target])
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for at in range(0, words.size, _CHUNK):
            _cast_chunk(words[at : at + _CHUNK], source, result[at : at + _CHUNK], target)
    return result.view(np.uint8)


def widened(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """Return the values of bytes of a dtype as fp32, 1-D."""
    return (raw if dtype == "F32" else cast(raw, dtype, "F32")).view(np.float32)


def rounded(values: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """Round values to a dtype; returns fp32."""
    if dtype == "F32":
        return values
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return widened(cast(flat, "F32", dtype), dtype).reshape(values.shape)


def ulp(values: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    """Return the distance between neighbouring numbers of a dtype at these magnitudes."""
    _, exponent = np.frexp(values.astype(np.float64))
    step: NDArray[np.float64] = np.ldexp(
        1.0, np.maximum(exponent - 1 - MANTISSA[dtype], _LEAST[dtype])
    )
    return step


def _cast_chunk(words: NDArray[Any], source: str, result: NDArray[Any], target: str) -> None:
    if source == "BF16" and target == "F32":
        _widen_bf16(words, result)
    elif target != "BF16":
        wide = cast(words.view(np.uint8), source, "F32") if source == "BF16" else words
        result[...] = wide.view(np.float32) if source == "BF16" else wide
    elif source == "BF16":
        result[...] = words
    else:
        _round_bf16(words.astype(np.float32, copy=False), result)


def _widen_bf16(words: NDArray[np.uint16], result: NDArray[np.float32]) -> None:
    kernels = library()
    if kernels is not None:
        kernels.widen_bf16(words, result)
    else:
        np.left_shift(words, 16, out=result.view(np.uint32), dtype=np.uint32)


def _round_bf16(wide: NDArray[np.float32], result: NDArray[np.uint16]) -> None:
    kernels = library()
    if kernels is not None:
        kernels.round_bf16(wide, result)
        return
    bits = wide.view(np.uint32)
    raised = bits >> 16
    raised &= 1
    raised += 0x7FFF
    raised += bits
    result[...] = raised.view(np.uint16)[_UPPER::2]
    odd = np.isnan(wide)
    if odd.any():
        result[odd] = _NAN


_CHUNK = 1 << 16
"""Elements at a time: temporaries of this size stay in the CPU cache."""
_UPPER = 1 if sys.byteorder == "little" else 0
_NAN = 0x7FC0
"""The quiet NaN without payload."""
