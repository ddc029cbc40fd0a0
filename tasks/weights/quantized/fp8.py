"""Weights stored as 8-bit floats with scales: DeepSeek-V3's blocks, compressed-tensors, ModelOpt.

A matrix X is stored as float8_e4m3fn, and beside it `X_scale_inv` or `X_scale`, by which it is
multiplied in all of these formats: one number, one per row, or one per block of the matrix, whose
last blocks may be partial. Scales of activations are not part of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

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


@dataclass(frozen=True)
class Scaled:
    """Packing of one matrix; the fields are those of `Packed` that other code reads.

    Attributes:
        shape: (..., out, in).
        block: rows and columns that share a scale.
        scale_dtype: dtype of the scales (safetensors name).
        parts: suffix and size in bytes of the matrix and of its scales.
        sides: keys of the scales.
        dtype: fp32, so that nothing is rounded before the merge.
    """

    shape: tuple[int, ...]
    block: tuple[int, int]
    scale_dtype: str
    parts: tuple[tuple[str, int], ...]
    sides: tuple[str, ...]
    dtype: str = "float32"

    def as_json(self) -> dict[str, Any]:
        """Return what `scaled_values` needs, as plain JSON."""
        return {
            "type": FP8,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "block": list(self.block),
            "scale_dtype": self.scale_dtype,
            "parts": [list(part) for part in self.parts],
        }


def is_activation_scale(key: str) -> bool:
    """Return True for scales of inputs, outputs and the KV cache."""
    return key.endswith(_ACTIVATIONS)


def read_scales(
    tensors: Mapping[str, TensorLike], config: Mapping[str, Any]
) -> tuple[dict[str, Scaled], list[str]]:
    """Find the matrices in 8 bits. Returns their packing by key, and what is wrong with any."""
    blocks = fp8_blocks(config)
    matrices: dict[str, Scaled] = {}
    findings: list[str] = []
    for key, info in tensors.items():
        if ITEM_BITS[info.dtype] != 8 or info.dtype == _EXPONENTS or info.dtype == "BOOL":
            continue
        side = next((key + suffix for suffix in _SCALES if key + suffix in tensors), None)
        if info.dtype != DTYPE:
            text = f"{describe(info.shape, info.dtype)}, which is not decoded here"
        elif side is None:
            text = f"{info.dtype} without {key.rpartition('.')[2]}{_SCALES[0]} or {_SCALES[1]}"
        elif isinstance(matrix := _scaled(key, info, side, tensors[side], blocks), Scaled):
            matrices[key] = matrix
            continue
        else:
            text = matrix
        findings.append(f"{key}: {text}")
    return matrices, findings


def _scaled(
    key: str,
    info: TensorLike,
    side: str,
    scale: TensorLike,
    blocks: Sequence[tuple[int, int]],
) -> Scaled | str:
    """Return the packing of one matrix, or why its scales do not fit."""
    if len(info.shape) < 2:
        return f"{describe(info.shape, info.dtype)} is no matrix"
    *lead, rows, columns = info.shape
    shape = tuple(scale.shape)
    if not lead:
        shape = (1, 1) if prod(shape) == 1 else (rows, 1) if shape == (rows,) else shape
    for block in (*blocks, (1, columns), (rows, columns)):
        if shape == (*lead, -(-rows // block[0]), -(-columns // block[1])):
            break
    else:
        return f"{list(info.shape)} with {describe(scale.shape, scale.dtype)} scales"
    if scale.dtype not in (*NUMPY, _EXPONENTS):
        return f"scales in {scale.dtype}"
    size = prod(shape) * ITEM_BITS[scale.dtype] // 8
    parts = (("", prod(info.shape)), (side.removeprefix(key), size))
    return Scaled(tuple(info.shape), block, scale.dtype, parts, (side,))


def scaled_values(
    stored: Mapping[str, Any], parts: Mapping[str, NDArray[np.uint8]]
) -> NDArray[np.float32]:
    """Return number times scale, one fp32 product an element, in the shape of the matrix.

    Args:
        stored: `Scaled.as_json`.
        parts: bytes of the matrix and of its scales, by suffix.
    """
    raw, scale = (parts[suffix] for suffix, _ in stored["parts"])
    (*_, rows, columns), (high, wide) = stored["shape"], stored["block"]
    values = _table()[raw].reshape(-1, rows, columns)
    if stored["scale_dtype"] == _EXPONENTS:
        scales = np.ldexp(np.float32(1), scale.astype(np.int32) - 127).astype(np.float32)
        scales[scale == 255] = np.nan
    else:
        scales = widened(scale, stored["scale_dtype"])
    scales = scales.reshape(len(values), -(-rows // high), -(-columns // wide))
    for row in range(scales.shape[1]):
        of_row = np.repeat(scales[:, row], wide, axis=-1)[:, None, :columns]
        values[:, row * high : (row + 1) * high] *= of_row
    return values.reshape(stored["shape"])


def _table() -> NDArray[np.float32]:
    """Return the values of the 256 codes: sign, 4 bits of exponent, 3 of mantissa, no infinity."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent > 0, 8 + mantissa, mantissa)
    values = np.ldexp(size.astype(np.float32), np.maximum(exponent, 1) - 10)
    values[code & 127 == 127] = np.nan
    return np.where(code > 127, -values, values).astype(np.float32)
