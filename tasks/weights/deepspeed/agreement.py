"""Below ZeRO-3 a checkpoint holds each weight twice: whole in 16 bits, and cut up in fp32.

Both are compared at a few places of every tensor, since sizes alone cannot tell a wrong order:
DeepSpeed 0.19.8's own `ds_to_universal.py` mixes up the parameters of a run with
`round_robin_gradients`, and its output loads without a complaint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.weights.deepspeed.pieces import Whole
from tasks.weights.deepspeed.states import ModelState
from tasks.weights.files.dtype_conversion import cast, casts
from tasks.weights.files.file_ranges import Reader
from tasks.weights.files.header import ITEM_BITS
from tasks.weights.pickled.tensors import TensorRef, TorchFile

SAMPLE = 32
"""Elements looked at, at either end of a tensor."""
_STEP = 2.0**-7
"""bf16 rounds by 2**-9 of a value at most, fp16 by less; a wrong tensor is off by its size."""
_TINY = 1e-6


def disagreements(state: ModelState, weights: Mapping[str, Whole]) -> list[str]:
    """Trained weights whose fp32 values are not those of the module.

    Args:
        state: rank 0's model state, of ZeRO-1 or 2.
        weights: the trained parameters.
    """
    findings = []
    for name, whole in weights.items():
        ref = state.module.get(name)
        if ref is None:
            findings.append(f"{name}: trained, but not in the module")
        elif casts(ref.dtype, "F32") and casts(whole.dtype, "F32"):
            finding = _difference(state.file, ref, whole)
            findings += [f"{name}: {finding}"] if finding else []
    return findings


def _difference(file: TorchFile, ref: TensorRef, whole: Whole) -> str:
    """How the module's tensor and the trained one differ; "" where they agree."""
    if ref.shape != whole.shape or not ref.contiguous:
        return f"{list(whole.shape)}, in the module {list(ref.shape)}, strides {list(ref.stride)}"
    if not ref.numel:
        return ""
    # Closed after each tensor: of a universal checkpoint every one lies in a file of its own.
    with Reader(whole.extents) as trained, Reader([file.extent(ref)]) as module:
        for start in {0, max(0, ref.numel - SAMPLE)}:
            count = min(SAMPLE, ref.numel - start)
            ours = _values(trained, whole.dtype, start, count)
            theirs = _values(module, ref.dtype, start, count)
            # Not finite on either side is for those to judge who look at values.
            with np.errstate(invalid="ignore"):
                far = np.abs(ours - theirs) > _STEP * np.abs(ours) + _TINY
            if far.any():
                return "its fp32 values are not those of the module"
    return ""


def _values(reader: Reader, dtype: str, start: int, count: int) -> NDArray[Any]:
    """Elements [start, start + count) as float32."""
    item = ITEM_BITS[dtype] // 8
    flat: NDArray[np.uint8] = np.empty(count * item, np.uint8)
    reader.into(flat, start * item)
    return (flat if dtype == "F32" else cast(flat, dtype, "F32")).view("<f4")
