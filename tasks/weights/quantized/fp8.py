"""Weights stored as 8-bit floats with scales: DeepSeek-V3's blocks, compressed-tensors, ModelOpt.

A matrix X is stored as float8_e4m3fn, and beside it `X_scale_inv` or `X_scale`, by which it is
multiplied in all of these formats: one number, one per row, or one per block of the matrix, whose
last blocks may be partial. Scales of activations are not part of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasks.core.contract import TensorLike, describe
from tasks.weights.files.dtypes import ITEM_BITS, NUMPY, widened
from tasks.weights.quantized.config_fields import fp8_blocks

FP8, DTYPE = "fp8", "F8_E4M3"
_EXPONENTS = "F8_E8M0"
_SCALES = "_scale_inv", "_scale"
_ACTIVATIONS = (
    ".input_scale", ".activation_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale",
)  # fmt: skip


class Packed(NamedTuple):
    """Storage of a quantized matrix: what decodes it, and the keys that belong to it.

    `packing` is plain JSON (`Op.packed`): `type`, `shape` and `dtype` (torch name) of the decoded
    matrix, suffix and size in bytes of the `parts` to read, in order, and fields of its format.
    """

    packing: dict[str, Any]
    sides: list[str]


def is_activation_scale(key: str) -> bool:
    """Return True for scales of inputs, outputs and the KV cache."""
    return key.endswith(_ACTIVATIONS)


def read_scales(
    tensors: Mapping[str, TensorLike], config: Mapping[str, Any]
) -> tuple[dict[str, Packed], list[str]]:
    """Find the matrices in 8 bits. Returns their packing by key, and what is wrong with any."""
    blocks = fp8_blocks(config)
    matrices: dict[str, Packed] = {}
    findings: list[str] = []
    for key, info in tensors.items():
        if ITEM_BITS[info.dtype] != 8 or info.dtype in (_EXPONENTS, "BOOL"):
            continue
        suffix = next((suffix for suffix in _SCALES if key + suffix in tensors), "")
        if info.dtype != DTYPE:
            findings.append(f"{key}: {info.dtype}, which is not decoded here")
        elif not suffix:
            findings.append(f"{key}: {info.dtype} without {_SCALES[0]} or {_SCALES[1]}")
        elif packing := _packing(info, suffix, tensors[key + suffix], blocks):
            matrices[key] = Packed(packing, [key + suffix])
        else:
            scale = describe(tensors[key + suffix].shape, tensors[key + suffix].dtype)
            findings.append(f"{key}: {describe(info.shape, info.dtype)} with scales {scale}")
    return matrices, findings


def _packing(
    info: TensorLike, suffix: str, scale: TensorLike, blocks: Sequence[tuple[int, int]]
) -> dict[str, Any] | None:
    """Return the packing of one matrix (..., out, in); None if its scales do not fit."""
    if len(info.shape) < 2 or scale.dtype not in (*NUMPY, _EXPONENTS):
        return None
    *lead, rows, columns = info.shape
    shape = tuple(scale.shape)
    if not lead:
        shape = (1, 1) if prod(shape) == 1 else (rows, 1) if shape == (rows,) else shape
    for high, wide in (*blocks, (1, columns), (rows, columns)):
        if shape == (*lead, -(-rows // high), -(-columns // wide)):
            size = prod(shape) * ITEM_BITS[scale.dtype] // 8
            return {
                "type": FP8,
                "dtype": "float32",  # so that nothing is rounded before the merge
                "shape": list(info.shape),
                "block": [high, wide],  # rows and columns that share a scale
                "scale_dtype": scale.dtype,
                "parts": [["", prod(info.shape)], [suffix, size]],
            }
    return None


def scaled_values(
    packing: Mapping[str, Any], parts: Mapping[str, NDArray[np.uint8]]
) -> NDArray[np.float32]:
    """Return number times scale, one fp32 product an element, from the parts' bytes by suffix."""
    raw, scale = (parts[suffix] for suffix, _ in packing["parts"])
    (*_, rows, columns), (high, wide) = packing["shape"], packing["block"]
    values = _table()[raw].reshape(-1, rows, columns)
    if packing["scale_dtype"] == _EXPONENTS:
        scales = np.ldexp(np.float32(1), scale.astype(np.int32) - 127).astype(np.float32)
        scales[scale == 255] = np.nan
    else:
        scales = widened(scale, packing["scale_dtype"])
    scales = scales.reshape(len(values), -(-rows // high), -(-columns // wide))
    for row in range(scales.shape[1]):
        of_row = np.repeat(scales[:, row], wide, axis=-1)[:, None, :columns]
        values[:, row * high : (row + 1) * high] *= of_row
    return values.reshape(packing["shape"])


def _table() -> NDArray[np.float32]:
    """Return the values of the 256 codes: sign, 4 bits of exponent, 3 of mantissa, no infinity."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent > 0, 8 + mantissa, mantissa)
    values = np.ldexp(size.astype(np.float32), np.maximum(exponent, 1) - 10)
    values[code & 127 == 127] = np.nan
    return np.where(code > 127, -values, values).astype(np.float32)
