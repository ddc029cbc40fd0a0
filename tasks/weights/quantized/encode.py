"""Weights in 8 bits: the arithmetic, by compressed-tensors' own functions, on blocks of rows.

Nothing is calibrated: a row's scale follows from its largest magnitude, and activations are
quantised while the model runs, token by token. So a block of rows needs no other row, and a matrix
is never whole in memory.

Scales are numbers that the model's own dtype can hold, rounded up to the next one. Engines differ
in what they hold them in (vLLM in fp32, transformers in the model's dtype): with such scales they
all compute with the same weights. Rounded to the nearest instead, the largest number of a row could
lie outside of what 8 bits reach.
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
"""safetensors name of the dtype in which scales are stored."""


@dataclass(frozen=True)
class Scheme:
    """A way to store and use weights in 8 bits.

    Attributes:
        preset: compressed-tensors' name of it.
        format: its name of the storage format.
        dtype: safetensors name of the numbers' dtype.
    """

    preset: str
    format: str
    dtype: str


SCHEMES = {
    "w8a8": Scheme("W8A8", "int-quantized", "I8"),
    "fp8": Scheme("FP8_DYNAMIC", "float-quantized", "F8_E4M3"),
}
"""By the word of `convert.quantize`. Both: symmetric, one scale a row, dynamic activations."""


def library_scheme(name: str) -> Any:
    """compressed-tensors' `QuantizationScheme` of a scheme, for linear layers."""
    from compressed_tensors.quantization import preset_name_to_scheme

    scheme = preset_name_to_scheme(SCHEMES[name].preset, ["Linear"])
    scheme.format = SCHEMES[name].format
    return scheme


@cache
def _arguments(name: str) -> Any:
    """compressed-tensors' `QuantizationArgs` of a scheme's weights."""
    return library_scheme(name).weights


def encode(encoding: Encoding, block: torch.Tensor) -> torch.Tensor:
    """The half that `encoding` names of some rows of a matrix.

    Args:
        encoding: which half, of which scheme.
        block: fp32, (rows, columns).

    Returns:
        (rows, columns) of int8 or float8_e4m3fn, or (rows, 1) of float32. The scale of a row that
        holds a NaN or an infinity is not finite.
    """
    from compressed_tensors.quantization.lifecycle.forward import quantize

    weights = _arguments(encoding.scheme)
    scale, zero = row_scales(encoding, block)
    if encoding.part == "scale":
        return scale
    return quantize(block, scale, zero, weights, dtype=weights.pytorch_dtype())


def row_scales(encoding: Encoding, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales, fp32 (rows, 1), and zero points, all 0, of the rows of `block`."""
    from compressed_tensors.quantization.utils import calculate_qparams

    low, high = block.amin(1, keepdim=True), block.amax(1, keepdim=True)
    scale, zero = calculate_qparams(low, high, _arguments(encoding.scheme))
    return _rounded_up(scale.float(), torch_dtype(encoding.held)), zero


def _rounded_up(scale: torch.Tensor, held: torch.dtype) -> torch.Tensor:
    """The least number of dtype `held` that is not below `scale` (positive), as fp32."""
    import torch

    near = scale.to(held)
    above = torch.nextafter(near, torch.full_like(near, torch.inf))
    return torch.where(near.float() < scale, above, near).float()
