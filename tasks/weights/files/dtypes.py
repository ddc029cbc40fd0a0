"""Dtypes of tensors: names, sizes, NaN and zeros in raw bytes, casts. Needs no torch.

Gathering and copying move bytes, and importing torch costs more than a second and 200 MB. bf16 has
no numpy type; it is the upper half of an fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasks.weights.native import library

_TABLE = {
    # safetensors name: (bits of an element, torch's name)
    "F64": (64, "float64"), "F32": (32, "float32"), "F16": (16, "float16"),
    "BF16": (16, "bfloat16"), "F8_E4M3": (8, "float8_e4m3fn"), "F8_E5M2": (8, "float8_e5m2"),
    "F8_E8M0": (8, "float8_e8m0fnu"), "I64": (64, "int64"), "I32": (32, "int32"),
    "I16": (16, "int16"), "I8": (8, "int8"), "U64": (64, "uint64"), "U32": (32, "uint32"),
    "U16": (16, "uint16"), "U8": (8, "uint8"), "BOOL": (8, "bool"),
}  # fmt: skip
ITEM_BITS = {name: bits for name, (bits, _) in _TABLE.items()}
TORCH_NAMES = {torch_name: name for name, (_, torch_name) in _TABLE.items()}
"""safetensors names by torch's names."""
DTYPE_NAMES = {name: TORCH_NAMES[name] for name in ("bfloat16", "float16", "float32")}
"""safetensors names of the dtypes that the configuration and config.json use."""


class _Float(NamedTuple):
    """Bits of a floating-point dtype.

    A number is not finite exactly if all its exponent bits are set, and zero exactly if every bit
    but the sign is clear.
    """

    word: str  # unsigned type of the same width
    exponent: int  # mask of the exponent
    magnitude: int  # mask of all bits but the sign
    mantissa: int  # explicit mantissa bits
    least: int  # exponent of the smallest positive number


_FLOATS = {
    "F64": _Float("<u8", 0x7FF0_0000_0000_0000, 0x7FFF_FFFF_FFFF_FFFF, 52, -1074),
    "F32": _Float("<u4", 0x7F80_0000, 0x7FFF_FFFF, 23, -149),
    "F16": _Float("<u2", 0x7C00, 0x7FFF, 10, -24),
    "BF16": _Float("<u2", 0x7F80, 0x7FFF, 7, -133),
}
MANTISSA = {name: each.mantissa for name, each in _FLOATS.items()}
"""Explicit mantissa bits by dtype."""
_WORDS = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}
NUMPY = tuple(_WORDS)
"""dtypes (safetensors names) that `cast` supports; torch casts all others."""
_CHUNK = 1 << 16
"""Elements at a time: temporaries of this size stay in the CPU cache."""
_NAN = 0x7FC0  # the quiet NaN without payload, in bf16


def torch_dtype(name: str) -> Any:
    """Return the torch dtype of a safetensors dtype name."""
    import torch

    return getattr(torch, _TABLE[name][1])


def short_name(dtype: Any) -> str:
    """Return the safetensors name of a torch dtype."""
    return TORCH_NAMES[str(dtype).removeprefix("torch.")]


def is_float(dtype: str) -> bool:
    """Return True if `dtype` (a safetensors name) is F64, F32, F16 or BF16."""
    return dtype in _FLOATS


def _magnitudes(raw: NDArray[np.uint8], dtype: str) -> Iterator[NDArray[Any]]:
    """Yield the bits of a float tensor without the sign, in chunks; they order as magnitudes do."""
    words = raw.view(_FLOATS[dtype].word)
    for at in range(0, words.size, _CHUNK):
        part = words[at : at + _CHUNK]
        yield part & np.array(_FLOATS[dtype].magnitude, part.dtype)


def nonfinite(raw: NDArray[np.uint8], dtype: str) -> int:
    """Count the elements that are infinite or NaN. Integer tensors have none."""
    if dtype not in _FLOATS:
        return 0
    least = _FLOATS[dtype].exponent
    # A maximum is cheaper than a count.
    chunks = (part for part in _magnitudes(raw, dtype) if part.max() >= least)
    return sum(int(np.count_nonzero(part >= least)) for part in chunks)


def largest(raw: NDArray[np.uint8], dtype: str) -> int:
    """Return the largest magnitude of a float tensor, as its bits without the sign.

    Infinity and NaN count as larger than every number. `magnitude` turns the bits into a number.
    """
    return max((int(part.max()) for part in _magnitudes(raw, dtype)), default=0)


def magnitude(bits: int, dtype: str) -> float:
    """Return the number for the bits that `largest` returned; may be NaN or infinite."""
    if dtype == "BF16":
        bits, dtype = bits << 16, "F32"
    word = _FLOATS[dtype].word
    return float(np.array(bits, word).view(word.replace("u", "f")))


def all_zero(raw: NDArray[np.uint8], dtype: str) -> bool:
    """Return True if every element is zero or minus zero, or if the tensor is empty."""
    parts = _magnitudes(raw, dtype) if dtype in _FLOATS else [raw]
    return not any(part.any() for part in parts)


def casts(source: str, target: str) -> bool:
    """Return True if `cast` supports this pair of dtypes."""
    return source in NUMPY and target in NUMPY


def cast(
    raw: NDArray[np.uint8], source: str, target: str, out: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """Cast the bytes of a tensor between bf16, fp16 and fp32, bit for bit as torch does on a CPU.

    A NaN stays a NaN, but its payload may differ from torch's, which depends on the NaN's place in
    a vector. `out` is a buffer for the result, of its exact size; None allocates one.
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
        1.0, np.maximum(exponent - 1 - _FLOATS[dtype].mantissa, _FLOATS[dtype].least)
    )
    return step


def _cast_chunk(words: NDArray[Any], source: str, result: NDArray[Any], target: str) -> None:
    kernels, wide = library(), words
    if source == "BF16" and target != "BF16":
        wide = result if target == "F32" else np.empty(words.size, np.float32)
        if kernels is not None:
            kernels.widen_bf16(words, wide)
        else:
            np.left_shift(words, 16, out=wide.view(np.uint32), dtype=np.uint32)
    if wide is result:
        return
    if target != "BF16" or source == "BF16":
        result[...] = wide
        return
    wide = words.astype(np.float32, copy=False)
    if kernels is not None:
        kernels.round_bf16(wide, result)
    else:
        bits = wide.view(np.uint32)
        raised = bits + 0x7FFF + (bits >> 16 & 1)  # to nearest, ties to even
        result[...] = raised >> 16
        result[np.isnan(wide)] = _NAN
