"""Log-probabilities of given tokens from hidden states, for vocabularies of any size.

Logits exist for one portion of tokens at a time. A frozen head (LoRA, QLoRA) is gone through once:
a token's log-probability depends on its own hidden state alone, so its gradient

    d log p(target) / d hidden = W^T (onehot(target) - softmax(logits))

is known as soon as the logits are, whatever the loss. It is made in the forward pass and kept:
N x H numbers where plain autograd keeps N x V; the backward pass scales it, token by token. A head
that is trained needs the gradient of the loss first, and computes its logits again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tasks.bf16_linear import slow_bf16, widened_weight

PORTION = 1 << 25
"""Logits that exist at once, as fp32: 128 MiB."""
BLOCK = 4096
"""Rows of a bf16 weight that are widened at once where bf16 products are slow: 4096 of width 4096
are 64 MiB."""


@dataclass(frozen=True)
class Scaling:
    """What is done to logits after the head: cap * tanh(factor * logits / cap) / temperature.

    Attributes:
        factor: Granite's 1 / `logits_scaling`, Cohere's `logit_scale`; 1 for most.
        cap: Gemma's `final_logit_softcapping`; None for most.
        temperature: that replies were sampled at; 1 for everything that is not sampled.
    """

    factor: float = 1.0
    cap: float | None = None
    temperature: float = 1.0

    @classmethod
    def of(cls, config: Any, temperature: float = 1.0) -> Scaling:
        """Of a transformers configuration."""
        text = config.get_text_config()
        factor = getattr(text, "logit_scale", None)
        divisor = getattr(text, "logits_scaling", None)
        return cls(
            factor=float(factor or 1.0) / float(divisor or 1.0),
            cap=getattr(text, "final_logit_softcapping", None),
            temperature=temperature,
        )

    @property
    def none(self) -> bool:
        """Whether logits stay as they are."""
        return math.isclose(self.factor / self.temperature, 1.0) and not self.cap

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """The scaled logits, differentiable."""
        if not self.cap:
            factor = self.factor / self.temperature
            return logits if math.isclose(factor, 1.0) else logits * factor
        capped = torch.tanh(logits * (self.factor / self.cap))
        return capped * (self.cap / self.temperature)

    def slope(self, scaled: torch.Tensor) -> torch.Tensor | float:
        """Derivative by the unscaled logits, given the scaled ones."""
        factor = self.factor / self.temperature
        if not self.cap:
            return factor
        return (1.0 - (scaled * (self.temperature / self.cap)).square()) * factor


def token_logprobs(
    head: nn.Module, hidden_NH: torch.Tensor, targets_N: torch.Tensor, scaling: Scaling
) -> torch.Tensor:
    """log p(target) under softmax(scaling(head(hidden))), natural logarithm.

    Args:
        head: hidden states to logits. Called as a module, so that ZeRO-3 gathers its weight.
        hidden_NH: of the tokens before the targets.
        targets_N: token ids.
        scaling: what is done to the logits.

    Returns:
        (N,) float32.
    """
    if type(head) is nn.Linear and not any(p.requires_grad for p in head.parameters()):
        wants = torch.is_grad_enabled() and hidden_NH.requires_grad

        def once(hidden: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = _Frozen.apply(
                hidden, head.weight, head.bias, targets_N, scaling, wants
            )
            return out

        with _standing_in(head, once):
            return head(hidden_NH)

    def portion(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = scaling(head(hidden)).float()
        return -nn.functional.cross_entropy(logits, targets, reduction="none")

    size = _size(head)
    if len(hidden_NH) <= size:
        return portion(hidden_NH, targets_N)
    parts = [
        checkpoint(portion, hidden, targets, use_reentrant=False)
        for hidden, targets in zip(hidden_NH.split(size), targets_N.split(size), strict=True)
    ]
    return torch.cat(parts)


def token_entropies(head: nn.Module, hidden_NH: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """Entropy of softmax(scaling(head(hidden))) in nats, with gradient; (N,) float32.

    Its gradient needs all logits of a token, so that portions are computed again for it.
    """

    def portion(hidden: torch.Tensor) -> torch.Tensor:
        logprobs = scaling(head(hidden)).float().log_softmax(dim=-1)
        return -(logprobs.exp() * logprobs).sum(dim=-1)

    parts = hidden_NH.split(_size(head))
    return torch.cat([checkpoint(portion, part, use_reentrant=False) for part in parts])


def _size(head: nn.Module) -> int:
    """Tokens of a portion."""
    vocabulary = getattr(head, "out_features", None) or 1 << 18
    return max(1, PORTION // vocabulary)


@contextlib.contextmanager
def _standing_in(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let `module` compute something else for a moment, hooks and all."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


class _Frozen(torch.autograd.Function):
    """Log-probabilities under a head that is not trained; see the top of this file."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        scaling: Scaling,
        wants: bool,
    ) -> torch.Tensor:
        size = max(1, PORTION // len(weight))
        found, slopes = [], []
        for h, t in zip(hidden.split(size), targets.split(size), strict=True):
            logits = _times_transposed(h, weight)
            if bias is not None:
                logits += bias
            if not scaling.none:
                logits = scaling(logits)
            slope = scaling.slope(logits) if wants else 1.0
            # The logits' own memory turns into exp, softmax and gradient, one after the other.
            logits -= logits.amax(dim=1, keepdim=True)
            picked = logits.gather(1, t[:, None])[:, 0]
            total = logits.exp_().sum(dim=1)
            found.append(picked - total.log())
            if wants:
                logits /= -total[:, None]
                logits.scatter_add_(1, t[:, None], torch.ones_like(picked)[:, None])
                if not scaling.none:
                    logits *= slope
                slopes.append(_times(logits, weight))
        if wants:
            ctx.save_for_backward(torch.cat(slopes))
        return torch.cat(found)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (slope,) = ctx.saved_tensors
        return (slope * grads[0][:, None]).to(slope.dtype), None, None, None, None, None


def _widening(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and slow_bf16()


def _times_transposed(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden @ weight.T as a new float32 tensor."""
    if not _widening(weight):
        return (hidden @ weight.t()).float()
    out = hidden.new_empty(len(hidden), len(weight), dtype=torch.float32)
    wide = hidden.float()
    for start in range(0, len(weight), BLOCK):
        block = widened_weight(weight[start : start + BLOCK])
        torch.mm(wide, block.t(), out=out[:, start : start + BLOCK])
    return out


def _times(slopes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """slopes @ weight, in the weight's dtype."""
    if not _widening(weight):
        return slopes.to(weight.dtype) @ weight
    out = slopes.new_zeros(len(slopes), weight.shape[1])
    for start in range(0, len(weight), BLOCK):
        out.addmm_(slopes[:, start : start + BLOCK], widened_weight(weight[start : start + BLOCK]))
    return out.to(weight.dtype)
