"""numpy casts give torch's bits for every 16-bit pattern and a million 32-bit patterns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tasks.weights.files.dtype_conversion import NUMPY, cast, casts

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
PAIRS = [(source, target) for source in NUMPY for target in NUMPY if source != target]
SPECIAL = [
    0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0xFFFFFFFF, 0x7F7FFFFF, 0x477FEFFF, 0x477FF000,
    0x33000000, 0x33000001, 0x0, 0x80000000, 0x1, 0x3F808000, 0x3F818000, 0x3F808001,
]  # fmt: skip


def _patterns(dtype: str) -> np.ndarray:
    if dtype != "F32":
        return np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    random = np.random.default_rng(0).integers(0, 1 << 32, 1_000_001, dtype=np.uint32)
    return np.concatenate([random, np.array(SPECIAL, np.uint32)]).view(np.uint8)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_equals_torch_except_for_nan_payloads(source: str, target: str) -> None:
    raw = _patterns(source)
    wanted = torch.from_numpy(raw.copy()).view(TORCH[source]).to(TORCH[target])
    actual = torch.from_numpy(cast(raw, source, target)).view(TORCH[target])
    nan = torch.isnan(wanted)
    assert torch.equal(torch.isnan(actual), nan)
    word = torch.int32 if target == "F32" else torch.int16
    assert torch.equal(actual.view(word)[~nan], wanted.view(word)[~nan])  # minus zero included


def test_other_dtypes_are_left_to_torch() -> None:
    assert not casts("F64", "F32")
    assert not casts("BF16", "F8_E4M3")
