"""vLLM's LoRA on CPUs, one adapter or several: against the products written out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tasks.serving.lora_ops import WIDENED, use_matrix_products

SLOTS, RANK, WIDE, PARTS = 2, 4, 24, (16, 8, 8)


@pytest.fixture
def wrapper() -> Any:
    """vLLM's own, its kernels exchanged."""
    use_matrix_products()
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    WIDENED.forget()
    return PunicaWrapperCPU(64, 64, "cpu", max_loras=SLOTS)


def matrices(seed: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    draw = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(torch.bfloat16)

    firsts = tuple(random(SLOTS, 1, RANK, WIDE) for _ in PARTS)
    return firsts, tuple(random(SLOTS, 1, width, RANK) for width in PARTS)


def asked(wrapper: Any, slots: Sequence[int], *, prefill: bool) -> None:
    """Each token's adapter, as vLLM tells it; -1: none."""
    from vllm.lora.layers import LoRAMapping

    ids = tuple(slot + 1 for slot in slots)
    mapping = LoRAMapping(index_mapping=ids, prompt_mapping=ids, is_prefill=prefill)
    wrapper.update_metadata(mapping, [slot + 1 for slot in range(SLOTS)], SLOTS, 100)


def check(wrapper: Any, slots: Sequence[int], *, seed: int = 0, prefill: bool = False) -> None:
    """What the wrapper adds is, token by token, what its adapter makes of it."""
    firsts, seconds = matrices(seed)
    x = torch.randn(len(slots), WIDE, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16)
    y = torch.ones(len(slots), sum(PARTS), dtype=torch.bfloat16)
    asked(wrapper, slots, prefill=prefill)
    wrapper.add_lora_linear(y, x, firsts, seconds, 0.5, PARTS)
    for token, slot in enumerate(slots):
        made = torch.zeros(sum(PARTS), dtype=torch.float64)
        if slot >= 0:
            made = 0.5 * torch.cat([
                second[slot, 0].double() @ (first[slot, 0].double() @ x[token].double())
                for first, second in zip(firsts, seconds, strict=True)
            ])  # fmt: skip
        torch.testing.assert_close(y[token].double(), 1 + made, rtol=2.0**-6, atol=2.0**-5)


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("slot", range(SLOTS))
def test_one_adapter_for_all(wrapper: Any, slot: int, prefill: bool) -> None:
    check(wrapper, [slot] * 7, prefill=prefill)
    assert wrapper.only_slot == slot


@pytest.mark.parametrize("prefill", [False, True])
def test_several(wrapper: Any, prefill: bool) -> None:
    check(wrapper, [0, 0, 1, 1, 1], prefill=prefill)
    assert wrapper.only_slot is None


def test_none_at_all(wrapper: Any) -> None:
    check(wrapper, [-1] * 5, prefill=True)
    assert wrapper.only_slot is None


def test_another_adapter_in_the_same_place(wrapper: Any) -> None:
    """vLLM copies the next one over it: nothing but `forget` tells."""
    firsts, seconds = matrices(1)
    x = torch.ones(3, WIDE, dtype=torch.bfloat16)
    asked(wrapper, [0] * 3, prefill=False)
    for _ in range(2):
        y = torch.zeros(3, sum(PARTS), dtype=torch.bfloat16)
        wrapper.add_lora_linear(y, x, firsts, seconds, 1.0, PARTS)
        seen = y.clone()
        for one in seconds:
            one.zero_()
        WIDENED.forget()
    assert seen.abs().max() == 0
