"""Forward passes over packed rows: log-probabilities of supervised tokens, or scores.

`model(row=row)` runs the trunk once over the row. A causal model applies its head to the supervised
positions only (`token_logprobs`) and returns their log-probabilities, or the results that
`TokenOutputs` selects. A model with a score head returns one score per sequence. Where packed
sequences would influence each other (`families.py`), the trunk gets them as a batch, padded at
their ends. Without `row` the model works as before. Its forward method is replaced, not wrapped,
so that ZeRO-3's hooks and parameter names stay as they are.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tasks.core.errors import ConfigError, TrainingError
from tasks.core.events import say
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.model import attention
from tasks.training.model.attention import SequenceParallel
from tasks.training.model.families import CAPPED, uncapped, why_padded
from tasks.training.tokens.rows import Row
from tasks.weights.model_class import trunk_of

_OURS = (attention.NAME, attention.SHARED)
ROUNDING = {torch.float32: 2.0**-16, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""Largest mean difference between two ways to compute the same numbers, relative to their size:
four times the rounding of bf16 and fp16, to allow for all layers; more for fp32."""


@dataclass(frozen=True)
class TokenOutputs:
    """Results to compute for each supervised token of a row, beside or instead of its log-prob."""

    temperature: float = 1.0  # sampling temperature of the log-probabilities
    entropy: bool = False  # entropies beside the log-probabilities
    states: bool = False  # only the hidden states that the tokens were predicted from
    router: bool = False  # the router loss of the row behind the log-probabilities


PLAIN = TokenOutputs()


def accept_packed_rows(model: Any, ranks: Ranks | None = None) -> None:
    """Let a causal model, or one with a score head, accept packed rows.

    ConfigError if the model's attention leaves out a cap of its logits, or cannot be divided over
    the ranks.
    """
    from transformers import AttentionInterface

    name = model.config._attn_implementation
    if (cap := uncapped(model.config.to_dict(), name)) is not None:
        raise ConfigError(
            f"{type(model).__name__} caps its attention logits at {cap}, which {name} leaves out",
            hint=CAPPED,
        )
    model.padded_rows = _must_pad(model)
    original, scored = model.forward, hasattr(model, "score")
    packs, shared = name == "sdpa" and not model.padded_rows, None
    if ranks is not None and ranks.sequence_group is not None:
        heads = model.config.get_text_config().num_attention_heads
        if not packs or heads % ranks.sequence_parallel:
            what = f"{type(model).__name__}: {name} attention of {heads} heads cannot be divided "
            what += f"over {ranks.sequence_parallel} ranks"
            raise ConfigError(what, hint="train.sequence_parallel=1")
        shared = SequenceParallel(ranks.sequence_group)

    def forward(
        self: Any, *args: Any, row: Row | None = None, outputs: TokenOutputs = PLAIN, **kwargs: Any
    ) -> Any:
        if row is None:
            return original(*args, **kwargs)
        part = row if shared is None else shared.part(row)
        hidden_TH, logits = _trunk(self, row, part, outputs)
        if scored:
            results = self.score(hidden_TH[part.ends])[:, 0].float()
        else:
            results = _token_outputs(self, hidden_TH[part.wanted], part, outputs)
        if shared is not None:
            results = shared.join(row, row.ends if scored else row.wanted, results)
        if not outputs.router:
            return results
        # One tensor, because DeepSpeed hooks into the backward pass of every output.
        return torch.cat([results, _router_loss(self, logits, row, shared)[None]])

    model.forward = types.MethodType(forward, model)
    if packs:
        ours = attention.NAME if shared is None else attention.SHARED
        kernel = attention.packed_sdpa if shared is None else shared.attention
        AttentionInterface.register(ours, kernel)
        model.set_attn_implementation(ours)


@contextlib.contextmanager
def evaluating(engine: Any) -> Iterator[None]:
    """Switch off gradients, dropout and recomputation of an engine, or a model, in the context."""
    was = getattr(engine, "module", engine).training
    engine.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        engine.train(was)


def model_of(module: Any) -> Any:
    """Return the transformers model within peft's wrapper, or `module` itself."""
    return module.get_base_model() if hasattr(module, "get_base_model") else module


def restore_attention(model: Any, name: str) -> None:
    """Restore transformers' own attention, which fingerprints are measured with."""
    if model.config._attn_implementation in _OURS:
        model.set_attn_implementation(name)


def _must_pad(model: Any) -> bool:
    """Return True if packed sequences would influence each other, as far as is known."""
    parameters = inspect.signature(trunk_of(model).forward).parameters
    stateful = getattr(model, "_is_stateful", False)
    known = why_padded(model.config.to_dict(), model.config._attn_implementation)
    # Packed attention is ours or flash; other attention has no mask that keeps sequences apart.
    masked = not model._supports_attention_backend
    return bool(known) or stateful or masked or "position_ids" not in parameters


def _trunk(model: Any, row: Row, part: Row, outputs: TokenOutputs) -> tuple[torch.Tensor, Any]:
    """Return (T, H) hidden states in the order of the row, and the routers' logits, if wanted."""
    extra: dict[str, Any] = {"output_router_logits": True} if outputs.router else {}
    if model.padded_rows:  # a batch, padded behind the ends of the sequences
        starts, ends = row.bounds[:-1].long(), row.bounds[1:].long()
        steps = torch.arange(int((ends - starts).max()), device=row.ids.device)[None]
        real = starts[:, None] + steps < ends[:, None]
        places = torch.where(real, starts[:, None] + steps, starts[:, None])
        out = trunk_of(model)(input_ids=row.ids[0][places], use_cache=False, **extra)
        logits = out.router_logits if outputs.router else ()
        return out.last_hidden_state[real], tuple(layer[real.flatten()] for layer in logits)
    name = model.config._attn_implementation
    if name in _OURS:
        extra["buckets"] = part.buckets
    elif name.startswith("flash_attention"):
        extra.update(attention.flash_bounds(row))
    out = trunk_of(model)(input_ids=part.ids, position_ids=part.positions, use_cache=False, **extra)
    return out.last_hidden_state[0], out.get("router_logits")


def _token_outputs(model: Any, hidden: torch.Tensor, row: Row, outputs: TokenOutputs) -> Any:
    """Return (N,) log-probabilities, with (N,) entropies if wanted; or (N, H) hidden states."""
    if outputs.states:
        return hidden
    scaling, head = Scaling.of(model.config, outputs.temperature), model.get_output_embeddings()
    results = token_logprobs(head, hidden, row.targets, scaling, entropies=outputs.entropy)
    return tuple(results) if outputs.entropy else results


def _router_loss(
    model: Any, router_logits: Sequence[torch.Tensor], row: Row, shared: SequenceParallel | None
) -> torch.Tensor:
    """Compute the load-balancing loss of a row's experts: E sum_e f_e P_e over the E experts.

    Fedus et al. 2021, "Switch Transformers", arXiv:2101.03961, eq. 4 to 6, as transformers computes
    it: f_e is the number of times that expert e was chosen and P_e the sum of its router
    probabilities, both over all tokens and layers and divided by their number. All tokens of a row
    count, prompts too. A step's loss depends on how examples are dealt to rows; each row weighs as
    much as its share of the step's tokens. `router_logits` are (t, E) of each layer with experts.
    """
    if not router_logits:
        problem = f"{type(model).__name__} returns no logits of its routers"
        raise ConfigError(problem, hint="train.router_aux_loss_coef=0")
    owner = model if hasattr(model, "num_experts_per_tok") else model.config.get_text_config()
    total, experts = row.ids.shape[1], router_logits[0].shape[-1]
    real = total if shared is None else shared.real_tokens(row)  # those behind fill up the part
    chosen = router_logits[0].new_zeros(experts, dtype=torch.float32)
    probabilities = torch.zeros_like(chosen)
    for logits in router_logits:
        weights = torch.softmax(logits, dim=-1)
        places = weights.topk(owner.num_experts_per_tok, dim=-1).indices[:real].reshape(-1)
        chosen = chosen + torch.bincount(places, minlength=experts).float()
        probabilities = probabilities + weights[:real].float().sum(dim=0)
    sums = torch.stack([chosen, probabilities])
    if shared is not None:
        sums = shared.total(sums)
    frequency, probability = sums / (total * len(router_logits))
    return experts * (frequency * probability).sum()


def require_same(engine: Any, row: Row) -> None:
    """Compare rows with the model's own forward pass, on the last sequence of a row.

    This catches families that mix packed sequences, whose rows are padded from then on, and those
    that transform their logits in ways unknown here: TrainingError if log-probabilities or scores
    differ by more than rounding. All ranks take part, with the same row.
    """
    differs, allowed = _difference(engine, row)
    model = model_of(getattr(engine, "module", engine))
    name = model.config._attn_implementation
    if differs > allowed and not model.padded_rows and name != attention.SHARED:
        restore_attention(model, "sdpa")
        model.padded_rows = True
        packed, (differs, allowed) = differs, _difference(engine, row)
        if differs <= allowed and os.environ.get("RANK", "0") == "0":
            say(f"packed sequences influence each other (by {packed:.2g}): they are padded instead")
    if not differs <= allowed:
        raise TrainingError(
            f"in a row, a sequence differs from the model's own forward pass by {differs:.3g} on "
            f"average; {allowed:.3g} is rounding",
            hint="the model mixes sequences, or transforms its logits in an unknown way; "
            "please report it",
        )


def _difference(engine: Any, row: Row) -> tuple[float, float]:
    """Return the mean difference of a row's last sequence from the same alone, and the limit."""
    last = int(row.ends.argmax())
    end = int(row.ends[last])
    start, own = end - int(row.positions[0, end]), row.owner == last
    with evaluating(engine):  # dropout differs in every pass
        out = engine(input_ids=row.ids[:, start : end + 1], use_cache=False).logits
        together = engine(row=row)
    if out.dim() == 2:  # scores
        alone, mine = out[:, 0].float(), together[last : last + 1]
    else:
        places, targets = row.wanted[own] - start, row.targets[own]
        alone = -nn.functional.cross_entropy(out[0, places].float(), targets, reduction="none")
        mine = together[own]
    dtype = next(p.dtype for p in engine.parameters() if p.is_floating_point())
    allowed = ROUNDING[dtype] * max(1.0, float(alone.abs().mean()))
    return float((mine - alone).abs().mean()), allowed


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

    Logits exist for one portion of tokens at a time. All portions lie within one call of the head:
    ZeRO-3 gathers weights in hooks around modules, and ranks differ in their number of portions.
    With one call per portion a rank would wait for a gather that the others never start. A trained
    head needs the gradient of the loss first, and computes its logits again.

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
    """Log-probabilities under a frozen head (LoRA, QLoRA): logits are computed once.

    A token's log-probability depends on its own hidden state alone, so its gradient

        d log p(target) / d hidden = W^T (onehot(target) - softmax(logits))

    is computed in the forward pass, whatever the loss. N x H numbers are kept for the backward
    pass, which scales them token by token; plain autograd would keep N x V.
    """

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
