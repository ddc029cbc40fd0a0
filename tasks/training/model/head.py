"""Log-probabilities of target tokens from hidden states, for vocabularies of any size.

Logits exist for one portion of tokens at a time. With a frozen head (LoRA, QLoRA) they are computed
once: a token's log-probability depends on its own hidden state alone, so its gradient

    d log p(target) / d hidden = W^T (onehot(target) - softmax(logits))

is computed from the logits in the forward pass, whatever the loss. N x H numbers are kept for the
backward pass, which scales them token by token; plain autograd would keep N x V. A trained head
needs the gradient of the loss first, and computes its logits again.

All portions lie within one call of the head. ZeRO-3 gathers weights in hooks around modules, and
ranks differ in their number of portions: with one call per portion a rank would wait for a gather
that the others never start.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

PORTION = 1 << 25
"""Largest number of logits that exist at a time."""


@dataclass(frozen=True)
class Scaling:
    """Scaling of logits after the head: cap * tanh(factor * logits / cap) / temperature."""

    # Granite's 1 / `logits_scaling`, Cohere's `logit_scale`; 1 for most families
    factor: float = 1.0
    cap: float | None = None  # Gemma's `final_logit_softcapping`; None for most families
    # sampling temperature of the responses; 1 for data that was not sampled
    temperature: float = 1.0

    @classmethod
    def of(cls, config: Any, temperature: float = 1.0) -> Scaling:
        """Read the scaling from a transformers configuration."""
        text = config.get_text_config()
        factor = float(getattr(text, "logit_scale", None) or 1.0)
        divisor = float(getattr(text, "logits_scaling", None) or 1.0)
        return cls(factor / divisor, getattr(text, "final_logit_softcapping", None), temperature)

    @property
    def none(self) -> bool:
        """Return True if the scaling leaves logits unchanged."""
        return math.isclose(self.factor / self.temperature, 1.0) and not self.cap

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the scaled logits, differentiable."""
        if not self.cap:
            return logits if self.none else logits * (self.factor / self.temperature)
        capped = torch.tanh(logits * (self.factor / self.cap))
        return capped * (self.cap / self.temperature)

    def slope(self, scaled: torch.Tensor) -> torch.Tensor | float:
        """Return the derivative with respect to the unscaled logits, given the scaled ones."""
        factor = self.factor / self.temperature
        if not self.cap:
            return factor
        return (1.0 - (scaled * (self.temperature / self.cap)).square()) * factor


def token_logprobs(
    head: Any,
    hidden_NH: torch.Tensor,
    targets_N: torch.Tensor,
    scaling: Scaling,
    *,
    entropies: bool = False,
) -> torch.Tensor:
    """Compute log p(target) under softmax(scaling(head(hidden))), natural logarithm.

    `entropies`: add the entropies of the same distributions. Their gradient needs all logits of a
    token, so portions are computed again even if the head is frozen.

    Returns:
        (N,) float32, in nats; (2, N) with entropies. One tensor, because in the backward pass
        ZeRO-3 gathers once per output.
    """

    def compute(body: nn.Module, logits_of: Any, hidden: torch.Tensor) -> torch.Tensor:
        frozen = type(body) is nn.Linear and not any(p.requires_grad for p in body.parameters())
        if frozen and not entropies:
            wants = torch.is_grad_enabled() and hidden.requires_grad
            out: torch.Tensor = _Frozen.apply(
                hidden, body.weight, body.bias, targets_N, scaling, wants
            )
            return out

        def portion(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            logits = scaling(logits_of(hidden)).float()
            if not entropies:
                return -nn.functional.cross_entropy(logits, targets, reduction="none")
            logprobs = logits.log_softmax(dim=-1)
            each = -(logprobs.exp() * logprobs).sum(dim=-1)
            return torch.stack([logprobs.gather(1, targets[:, None])[:, 0], each])

        size = max(1, PORTION // (getattr(body, "out_features", None) or 1 << 18))
        if len(hidden) <= size:
            return portion(hidden, targets_N)
        portions = zip(hidden.split(size), targets_N.split(size), strict=True)
        # recomputed in the backward pass
        parts = [checkpoint(portion, *each, use_reentrant=False) for each in portions]
        return torch.cat(parts, dim=-1)

    # One of these modules computes the logits: the head, or peft's copies of it.
    copies = getattr(head, "modules_to_save", None)
    bodies = [head] if copies is None else [head.original_module, *copies.values()]
    with contextlib.ExitStack() as stack:
        for body in bodies:
            stack.enter_context(_standing_in(body, partial(compute, body, body.forward)))
        results: torch.Tensor = head(hidden_NH)
    return results


@contextlib.contextmanager
def _standing_in(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward pass of `module` within the context; its hooks stay."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


class _Frozen(torch.autograd.Function):
    """Log-probabilities under a frozen head; see the docstring of this module."""

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
        logprobs, slopes = [], []
        for h, t in zip(hidden.split(size), targets.split(size), strict=True):
            logits = (h @ weight.t()).float()
            if bias is not None:
                logits += bias
            if not scaling.none:
                logits = scaling(logits)
            slope = scaling.slope(logits) if wants else 1.0
            # exp, softmax and gradient are computed in place, in the memory of the logits.
            logits -= logits.amax(dim=1, keepdim=True)
            picked = logits.gather(1, t[:, None])[:, 0]
            total = logits.exp_().sum(dim=1)
            logprobs.append(picked - total.log())
            if wants:
                logits /= -total[:, None]
                logits.scatter_add_(1, t[:, None], torch.ones_like(picked)[:, None])
                if not scaling.none:
                    logits *= slope
                slopes.append(logits.to(weight.dtype) @ weight)
        if wants:
            ctx.save_for_backward(torch.cat(slopes))
        return torch.cat(logprobs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (slope,) = ctx.saved_tensors
        return (slope * grads[0][:, None]).to(slope.dtype), None, None, None, None, None
