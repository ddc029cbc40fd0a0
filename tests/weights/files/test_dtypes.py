"""Values are inspected and cast as by torch, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.weights.files import dtype_bits as bits
from tasks.weights.files import dtype_conversion
from tasks.weights.files.dtype_conversion import NUMPY, cast, casts

DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
VALUES = st.lists(
    st.one_of(
        st.floats(width=16),
        st.sampled_from([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, 6e4]),
    ),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(dtype=st.sampled_from(sorted(DTYPES)), values=VALUES, chunk=st.sampled_from([16, 1 << 20]))
def test_agrees_with_torch(dtype: str, values: list[float], chunk: int) -> None:
    tensor = torch.tensor(values, dtype=torch.float64).to(DTYPES[dtype])
    raw = tensor.view(torch.uint8).numpy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bits, "_CHUNK", chunk)
        assert bits.nonfinite(raw, dtype) == int((~torch.isfinite(tensor)).sum())
        assert bits.all_zero(raw, dtype) == bool((tensor == 0).all())


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


@pytest.mark.parametrize("kernel", [True, False])
def test_casts_equal_torchs_except_for_nan_payloads(
    kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every 16-bit pattern and a million 32-bit patterns."""
    if not kernel:
        monkeypatch.setattr(dtype_conversion, "library", lambda: None)
    for source, target in PAIRS:
        raw = _patterns(source)
        wanted = torch.from_numpy(raw.copy()).view(DTYPES[source]).to(DTYPES[target])
        actual = torch.from_numpy(cast(raw, source, target)).view(DTYPES[target])
        nan = torch.isnan(wanted)
        assert torch.equal(torch.isnan(actual), nan)
        word = torch.int32 if target == "F32" else torch.int16
        assert torch.equal(actual.view(word)[~nan], wanted.view(word)[~nan])  # minus zero included
    assert not casts("F64", "F32")  # left to torch
