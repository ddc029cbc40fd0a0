"""bf16 linear layers through fp32: the same layer, better rounded, in the same memory."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.nn import functional

from tasks.serving import bf16_linear


@pytest.fixture
def widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the replacement, as on a CPU without bf16 products; undo it afterwards."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(functional, "linear", functional.linear)
    assert bf16_linear.use_fp32_where_faster()


@pytest.mark.parametrize("shape", [(5, 24), (2, 5, 24), (24,)])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.usefixtures("widened")
def test_values_and_gradients_are_fp32_rounded_once(shape: tuple[int, ...], biased: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(24, 16, bias=biased, dtype=torch.bfloat16)
    x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    exact = torch.nn.Linear(24, 16, bias=biased)
    exact.load_state_dict({k: v.float() for k, v in layer.state_dict().items()})
    wide = x.detach().float().requires_grad_()
    upstream = torch.randn((*shape[:-1], 16), dtype=torch.bfloat16)
    layer(x).backward(upstream)
    exact(wide).backward(upstream.float())
    assert torch.equal(layer(x), exact(wide).bfloat16())
    pairs = [(x, wide), *zip(layer.parameters(), exact.parameters(), strict=True)]
    for mine, theirs in pairs:
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad.bfloat16(), rtol=2**-8, atol=0)


@pytest.mark.usefixtures("widened")
def test_tensors_saved_for_the_backward_pass_are_bf16() -> None:
    layer = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    kept: list[torch.dtype] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.dtype)
        return tensor

    x = torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    assert set(kept) == {torch.bfloat16}


@pytest.mark.usefixtures("widened")
def test_frozen_weights_get_no_gradient() -> None:
    layer = torch.nn.Linear(8, 8, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None


def test_widened_weights_share_one_buffer_up_to_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bf16_linear, "SCRATCH", 4 * 64)
    monkeypatch.setattr(bf16_linear, "_buffers", threading.local())
    small, other, large = (torch.randn(n, 8, dtype=torch.bfloat16) for n in (8, 3, 9))
    with torch.inference_mode():  # as engines that generate do
        found = bf16_linear.widened_weight(small)
    assert torch.equal(found, small.float())
    again = bf16_linear.widened_weight(other)
    assert torch.equal(again, other.float())
    assert again.data_ptr() == found.data_ptr()
    assert torch.equal(bf16_linear.widened_weight(large), large.float())
    assert torch.equal(again, other.float())  # too large to be kept: elsewhere


@pytest.mark.usefixtures("widened")
def test_other_dtypes_are_left_alone() -> None:
    x, weight = torch.randn(3, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    assert torch.equal(functional.linear(x, weight), x @ weight.t())


@pytest.mark.parametrize("limit", [None, "ALL", "AVX512_CORE_BF16", "avx512_core_vnni"])
def test_a_cpu_with_native_bf16(monkeypatch: pytest.MonkeyPatch, limit: str | None) -> None:
    """torch's function is kept, unless oneDNN may not use bf16 instructions."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(functional, "linear", functional.linear)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if limit is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    plain, emulated = functional.linear, limit == "avx512_core_vnni"
    assert bf16_linear.use_fp32_where_faster() == emulated
    assert (functional.linear is plain) != emulated


def test_nothing_is_replaced_in_a_process_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(functional, "linear", plain := functional.linear)
    assert not bf16_linear.use_fp32_where_faster()
    assert functional.linear is plain
