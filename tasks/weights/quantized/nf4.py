"""Quantize a base to 4 bits and back with bitsandbytes, as QLoRA training does.

as_trained, RowsAsTrained   the base, or rows of it, as 4-bit training saw it
lost_in_4_bits              recognise a model that was merged into such a base
keep_as_loaded              keep bitsandbytes from repacking the layers of a loaded model

QLoRA (https://arxiv.org/abs/2305.14314) trains an adapter on top of the *quantized* base. A merge
into the dequantized base gives the model that was trained; a merge into the original does not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError
from tasks.weights.files.dtypes import ITEM_BITS, casts, short_name, widened
from tasks.weights.files.tensors import Reader, Tensors
from tasks.weights.quantized.packed import LEVELS, unpack

if TYPE_CHECKING:
    import torch

BLOCKSIZE = 64
"""Elements that share a scale: the default of bitsandbytes' `Params4bit` and of transformers."""
_SCALES = 256
"""Number of scales that double quantization packs together."""

_LAYER = re.compile(r"(?P<stack>\D*?)\.(?P<layer>\d+)\.(?P<rest>.+)")
_SAMPLED = 1 << 17
"""Number of elements that `lost_in_4_bits` reads from the beginning of a matrix."""
_ON_GRID = 0.85
"""Threshold of (error with the right blocks) / (error with shifted blocks); about 1.0 otherwise."""

_REPACKS = "support_avx512bf16_for_cpu"
"""Attribute of `bitsandbytes.nn.Linear4bit` that enables repacking."""

LOST_ALLOWED = "quantising it to 4 bits again would undo that training"
LOST_OVERRIDE = "peft=lora, or model.path=<the base before that training>"
"""Parts of the error for such a base: reason (`LOST_ALLOWED`), and what to type."""


def lost_in_4_bits(checkpoint: Tensors) -> str | None:
    """Find a matrix whose values lie close to NF4's, as in a merged QLoRA model.

    NF4 rounds most of its adapter's change away. An ordinary matrix has the same quantization error
    if its blocks are shifted by half their length; this one has a larger error then. A dequantized
    matrix without a change loses nothing and is not reported. Reads parts of the first, middle and
    last layer of each stack. Returns the matrix and its relative quantization error, or None.
    """
    stacks: dict[str, dict[int, dict[str, str]]] = {}
    for name, info in checkpoint.items():
        match = _LAYER.fullmatch(name)
        if match and len(info.shape) == 2 and casts(info.dtype, "F32"):
            layer = stacks.setdefault(match["stack"], {}).setdefault(int(match["layer"]), {})
            layer.setdefault(re.sub(r"\d+", "#", match["rest"]), name)
    names: list[str] = []
    for layers in stacks.values():
        order = sorted(layers)
        for number in sorted({order[0], order[len(order) // 2], order[-1]}):
            names += layers[number].values()
    for name in names:
        info = checkpoint[name]
        with Reader(info.extents) as reader:
            item = ITEM_BITS[info.dtype] // 8
            raw = reader.read(0, min(info.numel, _SAMPLED) * item)
        values = widened(raw, info.dtype)
        (error, changed), (shifted, _) = _rounding(values), _rounding(values[BLOCKSIZE // 2 :])
        if changed and error < _ON_GRID * shifted:
            return f"{name} is {error:.1%} off NF4's values (an ordinary matrix: about 9 %)"
    return None


def _rounding(values: NDArray[np.float32]) -> tuple[float, bool]:
    """Return NF4's relative error |Q(w) - w| / |w|, and True if it zeroes mostly nonzero values."""
    blocks = values[: values.size // BLOCKSIZE * BLOCKSIZE].reshape(-1, BLOCKSIZE)
    scales = np.abs(blocks).max(axis=1, keepdims=True, initial=0)
    scaled = np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales > 0)
    levels = np.array(LEVELS["nf4"], np.float32)
    nearest = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, scaled)]
    norm, zeros = float(np.linalg.norm(blocks)), scaled[nearest == 0]
    error = float(np.linalg.norm((nearest - scaled) * scales)) / norm if norm > 0 else 0.0
    return error, 2 * np.count_nonzero(zeros) > zeros.size


def check_quantization(quantization: Mapping[str, Any]) -> None:
    """Raise ArtifactError if `as_trained` cannot reproduce a quantization."""
    if quantization.get("type") not in ("nf4", "fp4") or "double_quant" not in quantization:
        raise ArtifactError(
            f"train.json: quantization {dict(quantization)} is not one of nf4, fp4 (double_quant)"
        )


def as_trained(weight: torch.Tensor, quantization: Mapping[str, Any]) -> torch.Tensor:
    """Quantize and dequantize one linear weight exactly as a 4-bit load by transformers does.

    `weight` (out, in) has the dtype in which training loaded the model, `quantization` is as in
    train.json; with "turned" the weight is (in, out), like GPT-2's, and its transpose is quantized.
    """
    import torch
    from bitsandbytes import functional

    turned = bool(quantization.get("turned"))
    weight = (weight.t() if turned else weight).contiguous()
    packed, state = functional.quantize_4bit(
        weight,
        blocksize=BLOCKSIZE,
        compress_statistics=bool(quantization["double_quant"]),
        quant_type=str(quantization["type"]),
        quant_storage=torch.uint8,
    )
    scales = state.absmax
    if state.nested:
        scales = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    # Not `dequantize_4bit`: it errs if rows are not whole blocks, see `packed.py`.
    restored = _restored(weight, packed, scales, state).reshape(weight.shape)
    return restored.t().contiguous() if turned else restored


class RowsAsTrained:
    """Some rows of what `as_trained` returns for a weight, without quantizing the other rows.

    Double quantization subtracts the mean of all scales, so scales are computed for the full weight
    (one maximum per block); everything else is done for the requested rows only. "turned" is not
    supported.
    """

    def __init__(self, weight: torch.Tensor, quantization: Mapping[str, Any]) -> None:
        import torch

        self._columns, self._flat = weight.shape[1], weight.contiguous().reshape(-1)
        self._quantization = quantization
        whole = self._flat.numel() // BLOCKSIZE * BLOCKSIZE
        peaks = [self._flat[:whole].reshape(-1, BLOCKSIZE).abs().amax(dim=1)]
        if whole < self._flat.numel():
            peaks.append(self._flat[whole:].abs().amax().reshape(1))
        self._scales = torch.cat(peaks).float()
        self._offset = self._scales.mean()

    def rows(self, first: int, end: int) -> torch.Tensor:
        """Return rows `[first, end)`, shape (end - first, in), in the dtype of the weight."""
        import torch
        from bitsandbytes import functional

        step = BLOCKSIZE * _SCALES
        start, stop = first * self._columns, end * self._columns
        low, high = start // step * step, min(-(-stop // step) * step, self._flat.numel())
        part = self._flat[low:high]
        packed, state = functional.quantize_4bit(
            part.reshape(1, -1),
            blocksize=BLOCKSIZE,
            quant_type=str(self._quantization["type"]),
            quant_storage=torch.uint8,
        )
        scales = self._scales[low // BLOCKSIZE : -(-high // BLOCKSIZE)]
        if self._quantization["double_quant"]:
            narrow, nested = functional.quantize_blockwise(scales - self._offset, blocksize=_SCALES)
            scales = functional.dequantize_blockwise(narrow, nested) + self._offset
        restored = _restored(part, packed, scales, state)
        return restored[start - low : stop - low].reshape(-1, self._columns)


def _restored(like: torch.Tensor, packed: Any, scales: Any, state: Any) -> torch.Tensor:
    """Decode packed 4-bit values with these scales; 1-D, in the dtype and size of `like`."""
    import torch

    raw = unpack(
        packed.reshape(-1).numpy(),
        scales.numpy(),
        like.numel(),
        short_name(like.dtype),
        kind=state.quant_type,
        blocksize=state.blocksize,
    )
    return torch.from_numpy(raw).view(like.dtype)


def keep_as_loaded(model: Any) -> Any:
    """Keep bitsandbytes from repacking a model's 4-bit layers on CPUs; return the model.

    Call it before the first forward pass. On a CPU with AVX-512 BF16, bitsandbytes 0.50.2 repacks a
    layer at its first pass in eval mode without gradients: from then on it computes with scales in
    bf16, and passes no gradient on.
    """
    for module in model.modules():
        if hasattr(module, _REPACKS):
            setattr(module, _REPACKS, False)
    return model
