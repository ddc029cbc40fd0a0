from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.weights.files import dtype_bits as bits

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


@pytest.mark.parametrize("dtype", DTYPES)
@given(values=VALUES)
def test_agrees_with_torch(dtype: str, values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float64).to(DTYPES[dtype])
    raw = tensor.view(torch.uint8).numpy()
    assert bits.nonfinite(raw, dtype) == int((~torch.isfinite(tensor)).sum())
    assert bits.all_zero(raw, dtype) == bool((tensor == 0).all())


def test_larger_than_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "_CHUNK", 16)
    tensor = torch.zeros(100, dtype=torch.bfloat16)
    tensor[[7, 8, 99]] = float("nan")
    raw = tensor.view(torch.uint8).numpy()
    assert bits.nonfinite(raw, "BF16") == 3


def test_integers_have_no_infinities() -> None:
    raw = np.full(8, 255, np.uint8)
    assert bits.nonfinite(raw, "I32") == 0
    assert not bits.all_zero(raw, "I32")
    assert bits.all_zero(np.zeros(8, np.uint8), "I32")
