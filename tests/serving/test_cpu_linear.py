"""vLLM's layers on CPUs: the same numbers, rounded once, whatever is filled up and widened."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tasks.serving.cpu_linear import Product, filled_up, packed, widened


@pytest.mark.parametrize("rows", [1, 5, 64, 65, 300, 512, 513])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("made", [widened, packed])
def test_a_layer_is_rounded_once(made: Callable[..., Product], rows: int, biased: bool) -> None:
    torch.manual_seed(rows)
    weight = torch.randn(96, 48).to(torch.bfloat16)
    x = torch.randn(rows, 48).to(torch.bfloat16)
    bias = torch.randn(96).to(torch.bfloat16) if biased else None
    found = made(weight)(x, bias)
    exact = x.double() @ weight.double().t()
    if bias is not None:
        exact += bias.double()
    assert found.dtype == torch.bfloat16
    # Half a unit in the last of 8 binary digits, and what sums in fp32 may be off by.
    torch.testing.assert_close(found.double(), exact, rtol=2.0**-8 + 1e-6, atol=1e-5)


def test_the_layer_keeps_what_it_was_made_of() -> None:
    """vLLM empties the weight afterwards, and gives the memory to the next one."""
    weight = torch.ones(32, 32).to(torch.bfloat16)
    layers = widened(weight), packed(weight)
    weight.zero_()
    for layer in layers:
        assert float(layer(torch.ones(1, 32, dtype=torch.bfloat16))[0, 0]) == 32.0


def test_inputs_of_three_dimensions() -> None:
    weight = torch.randn(8, 16)
    x = torch.randn(2, 35, 16)
    torch.testing.assert_close(packed(weight)(x), x @ weight.t())


def test_batches_of_few_sizes() -> None:
    """oneDNN keeps 1,024 plans; a model's layers and an adapter's have some 13 shapes."""
    sizes = {len(filled_up(torch.ones(count, 2))) for count in range(1, 257)}
    assert len(sizes) * 13 < 1024
    assert all(len(filled_up(torch.ones(count, 2))) >= count for count in range(1, 600))
    whole = filled_up(torch.ones(70, 2))
    assert torch.equal(whole, torch.cat((torch.ones(70, 2), torch.zeros(10, 2))))
