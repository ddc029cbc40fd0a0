"""vLLM's LoRA on a CPU with our functions in place, compared with products in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tasks.serving.vllm.lora_ops import use_single_adapter_products

pytestmark = pytest.mark.slow
SLOTS, WIDE, PARTS, MOST = 2, 24, (16, 8, 8), 512
RANK = 8


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's wrapper with our functions, which end with the test."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for module in (lora_ops, punica_cpu):
        for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
            function = getattr(module, name)
            monkeypatch.setattr(module, name, getattr(function, "shipped", function))
    assert use_single_adapter_products()
    return punica_cpu.PunicaWrapperCPU(MOST, 64, "cpu", max_loras=SLOTS)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("slots", "prefill"),
    [([1] * 7, False), ([0] * 259, True), ([0, 0, 1, 1, 1], True), ([-1] * 5, True)],
    ids=["decode", "prefill", "two adapters", "none"],
)
def test_what_is_added_to_each_token(wrapper: Any, slots: Sequence[int], prefill: bool) -> None:
    """`slots` is each token's adapter as vLLM passes it; -1: none."""
    from vllm.lora.layers import LoRAMapping

    firsts = tuple(random(n, SLOTS, 1, RANK, WIDE) for n in range(len(PARTS)))
    seconds = tuple(random(n, SLOTS, 1, width, RANK) / RANK**0.5 for n, width in enumerate(PARTS))
    seconds[1].zero_()  # as of a layer that is not trained
    x, y = random(9, len(slots), WIDE), torch.ones(len(slots), sum(PARTS), dtype=torch.bfloat16)
    ids = tuple(slot + 1 for slot in slots)
    mapping = LoRAMapping(index_mapping=ids, prompt_mapping=ids, is_prefill=prefill)
    wrapper.update_metadata(mapping, [slot + 1 for slot in range(SLOTS)], SLOTS, 100)
    wrapper.add_lora_linear(y, x, firsts, seconds, 0.5, PARTS)
    for token, slot in enumerate(slots):
        made = torch.zeros(sum(PARTS), dtype=torch.float64)
        if slot >= 0:
            made = 0.5 * torch.cat([
                second[slot, 0].double() @ (first[slot, 0].double() @ x[token].double())
                for first, second in zip(firsts, seconds, strict=True)
            ])  # fmt: skip
        torch.testing.assert_close(y[token].double(), 1 + made, rtol=2.0**-6, atol=2.0**-5)
