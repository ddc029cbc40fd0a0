"""fp32 products in vLLM's engine: rounded once, and only where bf16 is emulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tasks.serving.vllm import cpu_linear
from tasks.serving.vllm.cpu_linear import fp32_linear, use_fp32_products


@pytest.fixture
def utils(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module as shipped; a replacement ends with the test."""
    from vllm.model_executor.layers import utils

    function = utils.dispatch_cpu_unquantized_gemm
    shipped = getattr(function, "shipped", function)
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", shipped)
    return utils


@pytest.mark.parametrize("rows", [1, 5, 65, 300])
@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_is_rounded_once(rows: int, biased: bool) -> None:
    torch.manual_seed(rows)
    weight = torch.randn(96, 48).to(torch.bfloat16)
    x = torch.randn(rows, 48).to(torch.bfloat16)
    bias = torch.randn(96).to(torch.bfloat16) if biased else None
    output = fp32_linear(weight)(x, None, bias)
    exact = x.double() @ weight.double().t()
    if bias is not None:
        exact += bias.double()
    assert output.dtype == torch.bfloat16
    # Half a unit in the last of 8 binary digits, and the error of sums in fp32.
    torch.testing.assert_close(output.double(), exact, rtol=2.0**-8 + 1e-6, atol=1e-5)


def test_inputs_of_three_dimensions() -> None:
    weight, x = torch.randn(8, 16), torch.randn(2, 35, 16)
    torch.testing.assert_close(fp32_linear(weight)(x, None), x @ weight.t())


@pytest.mark.parametrize("remove", [True, False])
def test_a_layer_of_a_model(utils: Any, monkeypatch: pytest.MonkeyPatch, remove: bool) -> None:
    """vLLM frees the weight afterwards; other dtypes use vLLM's own function."""
    monkeypatch.setattr(cpu_linear, "slow_bf16", lambda: True)
    assert use_fp32_products()
    layer = torch.nn.Linear(32, 32, bias=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(layer.weight)
    kept = layer.weight
    utils.dispatch_cpu_unquantized_gemm(layer, remove)
    assert layer.weight.numel() == (0 if remove else 32 * 32)
    kept.data.zero_()
    ones = torch.ones(1, 32, dtype=torch.bfloat16)
    assert layer.cpu_linear(ones, layer.weight, None).tolist() == [[32.0] * 32]
    fp32_layer = torch.nn.Linear(32, 32, bias=False)
    utils.dispatch_cpu_unquantized_gemm(fp32_layer, False)
    assert fp32_layer.cpu_linear.__module__ == utils.__name__


def test_vllm_runs_as_shipped_on_a_gpu(utils: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = utils.dispatch_cpu_unquantized_gemm
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert not use_fp32_products()
    assert utils.dispatch_cpu_unquantized_gemm is shipped


@pytest.mark.parametrize(("slow", "version"), [(False, "0.32.0"), (True, "0.33.0")])
def test_vllm_runs_as_shipped(
    utils: Any, monkeypatch: pytest.MonkeyPatch, slow: bool, version: str
) -> None:
    shipped = utils.dispatch_cpu_unquantized_gemm
    monkeypatch.setattr(cpu_linear, "slow_bf16", lambda: slow)
    monkeypatch.setattr("vllm.__version__", version)
    assert not use_fp32_products()
    assert utils.dispatch_cpu_unquantized_gemm is shipped
