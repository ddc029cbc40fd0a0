"""vLLM's layers on CPUs without bf16 products: the same numbers, rounded once."""

from __future__ import annotations

import pytest
import torch

from tasks.serving.cpu_linear import widened


@pytest.mark.parametrize("rows", [1, 5, 64, 300])
@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_is_fp32_rounded_once(rows: int, biased: bool) -> None:
    torch.manual_seed(rows)
    weight = torch.randn(96, 48).to(torch.bfloat16)
    x = torch.randn(rows, 48).to(torch.bfloat16)
    bias = torch.randn(96).to(torch.bfloat16) if biased else None
    found = widened(weight)(x, None, bias)
    exact = x.double() @ weight.double().t()
    if bias is not None:
        exact += bias.double()
    assert found.dtype == torch.bfloat16
    # Half a unit in the last of 8 binary digits, and what sums in fp32 may be off by.
    torch.testing.assert_close(found.double(), exact, rtol=2.0**-8 + 1e-6, atol=1e-5)


def test_the_layer_keeps_what_it_was_made_of() -> None:
    """vLLM empties the weight afterwards, and gives the memory to the next one."""
    weight = torch.ones(32, 32).to(torch.bfloat16)
    layer = widened(weight)
    weight.zero_()
    assert float(layer(torch.ones(1, 32, dtype=torch.bfloat16), None)[0, 0]) == 32.0
