"""The head in portions gives the numbers of plain autograd, in a fraction of its memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tasks.training.model import packed_model as module
from tasks.training.model.packed_model import Scaling, token_logprobs

SCALINGS = {
    "none": Scaling(),
    "granite": Scaling(factor=0.125),
    "gemma": Scaling(cap=3.0),
    "both": Scaling(factor=2.0, cap=5.0),
}


def plain(head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor, scaling: Scaling):
    """Compute all logits at once, in float64."""
    logits = hidden.double() @ head.weight.double().t()
    if head.bias is not None:
        logits = logits + head.bias.double()
    logits = logits * scaling.factor
    if scaling.cap:
        logits = scaling.cap * torch.tanh(logits / scaling.cap)
    return torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]


def make(*, bias: bool = False, trained: bool = False, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    head = nn.Linear(16, 97, bias=bias, dtype=dtype).requires_grad_(trained)
    hidden = (torch.randn(50, 16) * 3).to(dtype).requires_grad_()
    return head, hidden, torch.randint(0, 97, (50,)), torch.randn(50)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(
    ("bias", "trained", "portion"), [(False, False, 1 << 20), (True, False, 679), (True, True, 679)]
)
def test_values_and_gradients_are_those_of_all_logits_at_once(
    monkeypatch: pytest.MonkeyPatch, name: str, bias: bool, trained: bool, portion: int
) -> None:
    monkeypatch.setattr(module, "PORTION", portion)
    head, hidden, targets, weights = make(bias=bias, trained=trained)
    wanted = [hidden, *(head.parameters() if trained else ())]
    before = head(hidden)
    expected = plain(head, hidden, targets, SCALINGS[name])
    theirs = torch.autograd.grad(expected @ weights.double(), wanted)
    computed = token_logprobs(head, hidden, targets, SCALINGS[name])
    assert computed.dtype == torch.float32
    torch.testing.assert_close(computed.double(), expected, rtol=1e-6, atol=2e-6)
    for mine, other in zip(torch.autograd.grad(computed @ weights, wanted), theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    assert torch.equal(head(hidden), before), "the head has its own forward pass again"


def wrapped(kind: str) -> nn.Module:
    """Return a head in peft's wrapper: with an adapter, a trained copy, or trained rows."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.utils import ModulesToSaveWrapper
    from peft.utils.other import TrainableTokensWrapper

    torch.manual_seed(1)
    base = nn.Linear(16, 97, bias=kind == "lora").requires_grad_(False)
    if kind == "copy":
        head: nn.Module = ModulesToSaveWrapper(base, "default")
        head.set_adapter("default")
    elif kind == "rows":
        head = TrainableTokensWrapper(base, "default", token_indices=[3, 50])
    else:
        holder = nn.ModuleDict({"head": base})
        config = LoraConfig(r=4, lora_alpha=8, target_modules=["head"], use_dora=kind == "dora")
        head = inject_adapter_in_model(config, holder)["head"]
    for parameter in head.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    return head


@pytest.mark.parametrize("kind", ["lora", "dora", "copy", "rows", "frozen"])
def test_wrapped_heads_and_entropies(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Values and gradients equal those of all logits at once.

    The head is called once: ZeRO-3 gathers a weight in the hooks around its module.
    """
    monkeypatch.setattr(module, "PORTION", 97 * 7)
    plain_head, hidden, targets, weights = make()
    head, scaling = plain_head if kind == "frozen" else wrapped(kind), SCALINGS["both"]
    trained = [p for p in head.parameters() if p.requires_grad]
    assert bool(trained) == (kind != "frozen")
    every = scaling(head(hidden)).log_softmax(dim=-1)
    expected = [every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(dim=-1)]
    calls: list[torch.Size] = []
    head.register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0].shape))
    logprobs, entropies = token_logprobs(head, hidden, targets, scaling, entropies=True)
    alone = token_logprobs(head, hidden, targets, scaling)
    for mine, other in zip([logprobs, entropies, alone], [*expected, expected[0]], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    wanted = [hidden, *trained]
    for mine, other in (
        (weights @ logprobs + entropies.sum(), weights @ expected[0] + expected[1].sum()),
        (weights @ alone, weights @ expected[0]),
    ):
        theirs = torch.autograd.grad(other, wanted, retain_graph=True)
        for gradient, right in zip(torch.autograd.grad(mine, wanted), theirs, strict=True):
            torch.testing.assert_close(gradient, right, rtol=1e-4, atol=1e-4)
    assert calls == [hidden.shape] * 2  # with the backward passes


def test_no_tensor_of_the_vocabularys_size_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PORTION", 97 * 7)
    head, hidden, targets, _ = make()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        token_logprobs(head, hidden, targets, Scaling())
    assert [tensor.numel() for tensor in kept] == [hidden.numel()]


def test_no_supervised_token_is_no_error() -> None:
    head, hidden, targets, _ = make()
    computed = token_logprobs(head, hidden[:0], targets[:0], Scaling())
    assert computed.shape == (0,)
    computed.sum().backward()
    assert hidden.grad is not None
    assert not hidden.grad.any()
