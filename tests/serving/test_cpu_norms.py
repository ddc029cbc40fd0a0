"""vLLM's kernels of RMS norms on a CPU: against float64, and left alone where they do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tasks.serving.cpu_norms import PROVIDER, use_norm_kernels

EPSILON = 1e-6


@pytest.fixture
def ops() -> Any:
    """vLLM's operations, the kernels made known."""
    use_norm_kernels()
    use_norm_kernels()  # a second engine in the process
    import vllm._custom_ops  # noqa: F401  loads the kernels
    from vllm.ir import ops

    return ops


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide * (wide.pow(2).mean(-1, keepdim=True) + EPSILON).rsqrt() * weight.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 37])
def test_norms(ops: Any, dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(rows)
    x, residual = torch.randn(rows, 96).to(dtype), torch.randn(rows, 96).to(dtype)
    weight = torch.randn(96).to(dtype)
    close = (
        {"rtol": 2.0**-7, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
    )
    with ops.rms_norm.set_priority([PROVIDER]), ops.fused_add_rms_norm.set_priority([PROVIDER]):
        found = ops.rms_norm(x, weight, EPSILON)
        before = x + residual
        normed, summed = ops.fused_add_rms_norm(x.clone(), residual.clone(), weight, EPSILON)
    assert found.dtype == normed.dtype == dtype
    torch.testing.assert_close(found.double(), exact(x, weight), **close, check_dtype=False)
    torch.testing.assert_close(summed, before)
    torch.testing.assert_close(normed.double(), exact(x + residual, weight), **close)


def test_what_does_not_fit_goes_the_old_way(ops: Any) -> None:
    """Heads that are cut out of one projection are not in one piece; the kernels would misread."""
    whole = torch.randn(5, 4 * 32).to(torch.bfloat16)
    heads = whole[:, :64].unflatten(1, (2, 32))
    weight = torch.ones(32, dtype=torch.bfloat16)
    assert not heads.is_contiguous()
    with ops.rms_norm.set_priority([PROVIDER]):
        found = ops.rms_norm(heads, weight, EPSILON)
        wide = ops.rms_norm(whole[:, :32].contiguous(), weight.float(), EPSILON)
    close = {"rtol": 2.0**-7, "atol": 1e-3}
    torch.testing.assert_close(found.double(), exact(heads, weight), **close)
    torch.testing.assert_close(wide.double(), exact(whole[:, :32], weight), **close)
