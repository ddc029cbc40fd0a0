"""The base as QLoRA training saw it: quantised to 4 bits by bitsandbytes, and back.

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
"""What bitsandbytes' `Params4bit` uses where nothing else is said, as transformers does."""


def check_quantization(quantization: Mapping[str, Any]) -> None:
    """Refuse what `as_trained` cannot reproduce. Raises ArtifactError."""
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
    restored = torch.empty(weight.numel(), dtype=weight.dtype)
    unpack(
        packed.reshape(-1).numpy(),
        scales.numpy(),
        restored,
        kind=state.quant_type,
        blocksize=state.blocksize,
    )
    restored = restored.reshape(weight.shape)
    return restored.t().contiguous() if turned else restored
