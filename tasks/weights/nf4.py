"""The base as QLoRA training has it: quantised to 4 bits by bitsandbytes, and back.

QLoRA (https://arxiv.org/abs/2305.14314) trains an adapter on top of the *quantised* base. Folding
it into the original base gives another model than the one that was trained; folding it into this
one does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tasks.errors import ArtifactError
from tasks.weights.stored4bit.decode import unpack

if TYPE_CHECKING:
    import torch

BLOCKSIZE = 64
"""Elements that share a scale: the default of bitsandbytes' `Params4bit`, and of transformers."""
_SCALES = 256
"""Scales that are packed together by double quantisation."""


def check_quantization(quantization: Mapping[str, Any]) -> None:
    """Refuse a quantisation that `as_trained` cannot reproduce. Raises ArtifactError."""
    if quantization.get("type") not in ("nf4", "fp4") or "double_quant" not in quantization:
        raise ArtifactError(
            f"train.json: quantization {dict(quantization)} is not one of nf4, fp4 (double_quant)"
        )


def as_trained(weight: torch.Tensor, quantization: Mapping[str, Any]) -> torch.Tensor:
    """Quantise and dequantise one linear weight exactly as a 4-bit load by transformers does.

    Args:
        weight: shape (out, in), in the dtype in which training loaded the model.
        quantization: `{"type": "nf4" | "fp4", "double_quant": bool, ...}` as in train.json; with
            "turned" the weight is (in, out), as GPT-2's are, and its transpose is quantised.

    Returns:
        The same shape and dtype.
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
    # Not `dequantize_4bit`: see `stored4bit/decode.py` on rows that are no whole number of blocks.
    restored = _restored(weight, packed, scales, state).reshape(weight.shape)
    return restored.t().contiguous() if turned else restored


class RowsAsTrained:
    """Some rows of what `as_trained` returns, without quantising the other rows.

    Double quantisation subtracts the mean of all scales, so those are computed for the whole weight
    (one maximum per block); everything else is done for the wanted rows.

    Args:
        weight: shape (out, in), as for `as_trained`; "turned" is not supported.
        quantization: as for `as_trained`.
    """

    def __init__(self, weight: torch.Tensor, quantization: Mapping[str, Any]) -> None:
        self._columns, self._flat = weight.shape[1], weight.contiguous().reshape(-1)
        self._quantization = quantization
        whole = self._flat.numel() // BLOCKSIZE * BLOCKSIZE
        peaks = [self._flat[:whole].reshape(-1, BLOCKSIZE).abs().amax(dim=1)]
        if whole < self._flat.numel():
            peaks.append(self._flat[whole:].abs().amax().reshape(1))
        self._scales = _torch().cat(peaks).float()
        self._offset = self._scales.mean()

    def rows(self, first: int, end: int) -> torch.Tensor:
        """Rows `[first, end)`, shape (end - first, in), dtype of the weight."""
        from bitsandbytes import functional

        step = BLOCKSIZE * _SCALES
        start, stop = first * self._columns, end * self._columns
        low, high = start // step * step, min(-(-stop // step) * step, self._flat.numel())
        part = self._flat[low:high]
        packed, state = functional.quantize_4bit(
            part.reshape(1, -1),
            blocksize=BLOCKSIZE,
            quant_type=str(self._quantization["type"]),
            quant_storage=_torch().uint8,
        )
        scales = self._scales[low // BLOCKSIZE : -(-high // BLOCKSIZE)]
        if self._quantization["double_quant"]:
            narrow, nested = functional.quantize_blockwise(scales - self._offset, blocksize=_SCALES)
            scales = functional.dequantize_blockwise(narrow, nested) + self._offset
        restored = _restored(part, packed, scales, state)
        return restored[start - low : stop - low].reshape(-1, self._columns)


def _restored(like: torch.Tensor, packed: Any, scales: Any, state: Any) -> torch.Tensor:
    """Decode packed 4-bit values with these scales; 1-D, in the dtype and size of `like`."""
    restored = _torch().empty(like.numel(), dtype=like.dtype)
    unpack(
        packed.reshape(-1).numpy(),
        scales.numpy(),
        restored,
        kind=state.quant_type,
        blocksize=state.blocksize,
    )
    return restored


def _torch() -> Any:
    import torch

    return torch
