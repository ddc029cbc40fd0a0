"""Quantize weights to 8 bits with compressed-tensors' functions, in blocks of rows.

There is no calibration: a row's scale follows from its largest magnitude, and activations are
quantized per token while the model runs. So each row is independent, and the full matrix is never
in memory.

Scales are rounded up to the next number of the model's own dtype. Engines keep scales in different
dtypes (vLLM in fp32, transformers in the model's dtype); such scales give all of them the same
weights. Rounding to nearest could put the largest element of a row beyond the range of 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from tasks.weights.files.reader import torch_dtype
from tasks.weights.plan.operations import Encoding

if TYPE_CHECKING:
    import torch

SCALE_DTYPE = "F32"
"""Dtype in which scales are stored (safetensors name)."""


@dataclass(frozen=True)
class Scheme:
    """A way to store and use weights in 8 bits.

    Attributes:
        preset: its name in compressed-tensors.
        format: storage format in compressed-tensors.
        dtype: dtype of the weights (safetensors name).
    """

    preset: str
    format: str
    dtype: str


SCHEMES = {
    "w8a8": Scheme("W8A8", "int-quantized", "I8"),
    "fp8": Scheme("FP8_DYNAMIC", "float-quantized", "F8_E4M3"),
}
"""Schemes by value of `convert.quantize`. Both are symmetric, with one scale per row and dynamic
activations."""


def library_scheme(name: str) -> Any:
    """Return compressed-tensors' `QuantizationScheme` of a scheme for linear layers."""
    from compressed_tensors.quantization import preset_name_to_scheme

    scheme = preset_name_to_scheme(SCHEMES[name].preset, ["Linear"])
    scheme.format = SCHEMES[name].format
    return scheme


@cache
def _arguments(name: str) -> Any:
    return library_scheme(name).weights


def encode(encoding: Encoding, block: torch.Tensor) -> torch.Tensor:
    """Quantize some rows of a matrix: return their 8-bit weights or their scales.

    Args:
        encoding: the scheme, and its part "weight" or "scale".
        block: fp32, shape (rows, columns).

    Returns:
        Weights: int8 or float8_e4m3fn, shape (rows, columns). Scales: float32, shape (rows, 1);
        the scale of a row with a NaN or an infinity is not finite.
    """
    from compressed_tensors.quantization.lifecycle.forward import quantize

    weights = _arguments(encoding.scheme)
    scale, zero = row_scales(encoding, block)
    if encoding.part == "scale":
        return scale
    return quantize(block, scale, zero, weights, dtype=weights.pytorch_dtype())


def row_scales(encoding: Encoding, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales, fp32 of shape (rows, 1), and zero points, all 0, for the rows of `block`."""
    from compressed_tensors.quantization.utils import calculate_qparams

    low, high = block.amin(1, keepdim=True), block.amax(1, keepdim=True)
    scale, zero = calculate_qparams(low, high, _arguments(encoding.scheme))
    return _rounded_up(scale.float(), torch_dtype(encoding.held)), zero


def _rounded_up(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round positive scales up to numbers that `dtype` represents; returns fp32."""
    import torch

    near = scale.to(dtype)
    above = torch.nextafter(near, torch.full_like(near, torch.inf))
    return torch.where(near.float() < scale, above, near).float()
