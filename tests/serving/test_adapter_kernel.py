"""The kernel for an adapter's part of a layer: exact where its sums are, for all kinds of CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.serving.native import adapter
from tasks.serving.native.adapter import AdapterKernel, Layer, adapter_kernel
from tests.serving.compiled_for import OLDER, kernel_for

FORMATS = st.sampled_from([torch.bfloat16, torch.float32])

pytestmark = pytest.mark.skipif(adapter_kernel() is None, reason="no C compiler here")


@pytest.fixture(params=OLDER, scope="module")
def kernel(request: pytest.FixtureRequest) -> AdapterKernel:
    return AdapterKernel(kernel_for(request.param, "adapter.c"))


class Case:
    """A layer's adapter in the second of two slots, and rows that lie apart."""

    def __init__(self, rows: int, wide: int, rank: int, widths: list[int], dtype: Any) -> None:
        draw = torch.Generator().manual_seed(rows * 1000 + wide)

        def small(*shape: int) -> torch.Tensor:
            return torch.randint(-1, 2, shape, generator=draw).to(dtype)

        self.firsts = [small(2, 1, rank, wide) for _ in widths]
        self.seconds = [small(2, 1, width, rank) for width in widths]
        self.widths = widths
        self.x = small(rows, wide + 3)[:, :wide]
        self.all_y = small(rows, sum(widths) + 5)
        self.y = self.all_y[:, : sum(widths)]

    def added(self, kernel: AdapterKernel, scale: float) -> torch.Tensor:
        layer = Layer.of(self.firsts, self.seconds, 1, self.widths)
        assert layer is not None
        assert layer.fits(self.x, self.y)
        kernel.add(layer, self.x, self.y, scale)
        return self.y

    def expected(self, scale: float) -> torch.Tensor:
        """Written out; sums of such numbers are exact before they are rounded."""
        parts = []
        for a, b in zip(self.firsts, self.seconds, strict=True):
            inner = (self.x.double() @ a[1, 0].double().t()).to(self.x.dtype)
            inner = (scale * inner.double()).to(self.x.dtype)
            parts.append(inner.double() @ b[1, 0].double().t())
        return (self.y.double() + torch.cat(parts, 1)).to(self.y.dtype)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.integers(1, 40) | st.sampled_from([255, 256, 257, 600]),
    wide=st.integers(1, 80),
    rank=st.sampled_from([8, 16, 64]),
    widths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    dtype=FORMATS,
    scale=st.sampled_from([1.0, 0.5, 3.0]),
)
def test_it_is_what_is_written_out(kernel, rows, wide, rank, widths, dtype, scale) -> None:
    case = Case(rows, wide, rank, widths, dtype)
    expected, beside = case.expected(scale), case.all_y[:, sum(widths) :].clone()
    assert torch.equal(case.added(kernel, scale), expected)
    assert torch.equal(case.all_y[:, sum(widths) :], beside)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_does_not_depend_on_those_beside_it(kernel: AdapterKernel, dtype: Any) -> None:
    """Sums of such numbers are not exact: another order would show."""
    case = Case(70, 300, 32, [100, 40], dtype)
    for one in (case.x, case.y, *case.firsts, *case.seconds):
        one.copy_(torch.randn(one.shape, generator=torch.Generator().manual_seed(one.numel())))
    before = case.y.clone()
    together = case.added(kernel, 0.7).clone()
    case.y.copy_(before)
    layer = Layer.of(case.firsts, case.seconds, 1, case.widths)
    assert layer is not None
    for row in range(70):
        kernel.add(layer, case.x[row : row + 1], case.y[row : row + 1], 0.7)
    assert torch.equal(case.y, together)
    assert not torch.equal(before, together)


@pytest.mark.parametrize(("dtype", "roundings"), [(torch.bfloat16, 2), (torch.float32, 16)])
def test_sums_are_as_precise_as_fp32(kernel: AdapterKernel, dtype: Any, roundings: int) -> None:
    case = Case(9, 3000, 64, [50], dtype)
    draw = torch.Generator().manual_seed(0)
    for one in (case.x, case.y, *case.firsts, *case.seconds):
        one.copy_(torch.randn(one.shape, generator=draw))
    expected = case.expected(0.25).double()
    # Each lane sums 188 products and more, at every step of which fp32 is rounded.
    allowed = roundings * torch.finfo(dtype).eps * (3000 * 64) ** 0.5 * 0.25
    assert (case.added(kernel, 0.25).double() - expected).abs().max() < allowed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_not_finite_stays_so(kernel: AdapterKernel, dtype: Any) -> None:
    case = Case(6, 20, 8, [20], dtype)
    for a, b in zip(case.firsts, case.seconds, strict=True):
        a.fill_(1)
        b.fill_(1)
    case.x[1, 3], case.x[4, 5] = torch.nan, torch.inf
    found = case.added(kernel, 1.0)
    assert found[1].isnan().all()
    assert found[4].isposinf().all()
    assert found[[0, 2, 3, 5]].isfinite().all()


def test_what_is_not_trained_is_left_alone(kernel: AdapterKernel) -> None:
    """Zeros of vLLM's: not even a NaN comes through."""
    case = Case(6, 20, 8, [20, 10], torch.bfloat16)
    case.seconds[0].zero_()
    case.x[2] = torch.nan
    before = case.y.clone()
    found = case.added(kernel, 1.0)
    assert torch.equal(found[:, :20], before[:, :20])
    assert found[2, 20:].isnan().all()


def test_layers_that_it_does_not_know() -> None:
    def asked(rank: int, dtype: Any, count: int = 1, second: Any = None) -> Layer | None:
        a, b = torch.zeros(1, 1, rank, 16, dtype=dtype), torch.zeros(1, 1, 16, rank, dtype=dtype)
        return Layer.of([a] * count, [b.to(second or dtype)] * count, 0, [16] * count)

    assert asked(8, torch.bfloat16) is not None
    assert asked(8, torch.float32, adapter.PARTS) is not None
    assert asked(8, torch.float32, adapter.PARTS + 1) is None
    assert asked(4, torch.bfloat16) is None
    assert asked(1024, torch.bfloat16) is None
    assert asked(8, torch.float16) is None
    assert asked(8, torch.bfloat16, second=torch.float32) is None


def test_tensors_that_do_not_fit_a_layer() -> None:
    a, b = torch.zeros(1, 1, 8, 16), torch.zeros(1, 1, 10, 8)
    layer = Layer.of([a], [b], 0, [10])
    assert layer is not None
    x, y = torch.zeros(3, 16), torch.zeros(3, 10)
    assert layer.fits(x, y)
    assert not layer.fits(x[:, :8], y)
    assert not layer.fits(x, y[:, :9])
    assert not layer.fits(x.bfloat16(), y)
    assert not layer.fits(x.t().contiguous().t(), y)
