"""Compare the fp32 weights of ZeRO-1 and 2 with the 16-bit weights in the same checkpoint.

Below ZeRO-3 a checkpoint holds each weight twice: as a full tensor in 16 bits, and partitioned in
fp32. A few elements of every tensor are compared, since sizes alone cannot reveal a wrong order:
DeepSpeed 0.19.8's own `ds_to_universal.py` mixes up the parameters of a run with
`round_robin_gradients`, and its output loads without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.weights.deepspeed.states import ModelState
from tasks.weights.files.dtype_conversion import casts, widened
from tasks.weights.files.file_ranges import Reader
from tasks.weights.files.header import ITEM_BITS
from tasks.weights.files.source import FullTensor
from tasks.weights.pickled.tensors import TensorRef, TorchFile

SAMPLE = 32
"""Number of elements compared at each end of a tensor."""
_STEP = 2.0**-7
"""Relative tolerance. bf16 rounds by at most 2**-9 and fp16 by less; a wrong tensor differs by its
own size."""
_TINY = 1e-6


def disagreements(state: ModelState, weights: Mapping[str, FullTensor]) -> list[str]:
    """Return one line for every trained weight whose fp32 values differ from the module's.

    Args:
        state: model state of rank 0, of ZeRO-1 or 2.
        weights: the trained parameters by name.
    """
    findings = []
    for name, tensor in weights.items():
        ref = state.module.get(name)
        if ref is None:
            findings.append(f"{name}: trained, but not in the module")
        elif casts(ref.dtype, "F32") and casts(tensor.dtype, "F32"):
            finding = _difference(state.file, ref, tensor)
            findings += [f"{name}: {finding}"] if finding else []
    return findings


def _difference(file: TorchFile, ref: TensorRef, tensor: FullTensor) -> str:
    """Return how the module's tensor differs from the trained one; "" if they agree."""
    if ref.shape != tensor.shape or not ref.contiguous:
        return (
            f"shape {list(tensor.shape)}, in the module {list(ref.shape)} "
            f"with strides {list(ref.stride)}"
        )
    if not ref.numel:
        return ""
    # Closed after each tensor: a universal checkpoint has one file per parameter.
    with Reader(tensor.extents) as trained, Reader([file.extent(ref)]) as module:
        for start in {0, max(0, ref.numel - SAMPLE)}:
            count = min(SAMPLE, ref.numel - start)
            fp32 = _values(trained, tensor.dtype, start, count)
            module_values = _values(module, ref.dtype, start, count)
            # NaN and infinity are ignored: other checks report values that are not finite.
            with np.errstate(invalid="ignore"):
                differs = np.abs(fp32 - module_values) > _STEP * np.abs(fp32) + _TINY
            if differs.any():
                return "its fp32 values are not those of the module"
    return ""


def _values(reader: Reader, dtype: str, start: int, count: int) -> NDArray[Any]:
    """Read elements `[start, start + count)` as fp32."""
    item = ITEM_BITS[dtype] // 8
    return widened(reader.read(start * item, count * item), dtype)
