"""Below ZeRO-3 a checkpoint holds each weight twice: whole in 16 bits, and cut up in fp32.

Both are compared at a few places of every tensor, since sizes alone cannot tell a wrong order:
DeepSpeed 0.19.8's own `ds_to_universal.py` mixes up the parameters of a run with
`round_robin_gradients`, and its output loads without a complaint.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.weights.casts import cast, casts
from tasks.weights.deepspeed.pieces import Whole
from tasks.weights.deepspeed.states import ModelState
from tasks.weights.extents import part
from tasks.weights.header import ITEM_BITS
from tasks.weights.source import Extent

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
    handles: dict[Path, int] = {}
    findings = []
    try:
        for name, whole in weights.items():
            ref = state.module.get(name)
            if ref is None:
                findings.append(f"{name}: trained, but not in the module")
                continue
            if not (casts(ref.dtype, "F32") and casts(whole.dtype, "F32")):
                continue
            if ref.shape != whole.shape or not ref.contiguous:
                findings.append(
                    f"{name}: {list(whole.shape)}, in the module {list(ref.shape)}, "
                    f"strides {list(ref.stride)}"
                )
                continue
            module = [state.file.extent(ref)] if ref.numel else []
            for start in {0, max(0, ref.numel - SAMPLE)}:
                ours = _values(whole.extents, whole.dtype, start, whole, handles)
                theirs = _values(module, ref.dtype, start, whole, handles)
                # Not finite on either side is for those to judge who look at values.
                with np.errstate(invalid="ignore"):
                    far = np.abs(ours - theirs) > _STEP * np.abs(ours) + _TINY
                if far.any():
                    findings.append(f"{name}: its fp32 values are not those of the module")
                    break
    finally:
        for handle in handles.values():
            os.close(handle)
    return findings


def _values(
    extents: Sequence[Extent], dtype: str, start: int, whole: Whole, handles: dict[Path, int]
) -> NDArray[Any]:
    """Up to SAMPLE elements from `start` on, as float32."""
    item = ITEM_BITS[dtype] // 8
    count = min(SAMPLE, prod(whole.shape) - start)
    raw = b""
    for piece in part(extents, start * item, count * item):
        if piece.path not in handles:
            handles[piece.path] = os.open(piece.path, os.O_RDONLY)
        raw += os.pread(handles[piece.path], piece.nbytes, piece.start)
    flat = np.frombuffer(raw, np.uint8)
    return (flat if dtype == "F32" else cast(flat, dtype, "F32")).view("<f4")
