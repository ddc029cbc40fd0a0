"""Forward passes over packed rows: log-probabilities of supervised tokens, or scores.

`model(row=row)` runs the trunk once over the row. A causal model applies its head to the supervised
positions only (`head.py`) and returns their log-probabilities, or the results that `TokenOutputs`
selects. A model with a score head returns one score per sequence. Where packed sequences would
influence each other (`families.py`), the trunk gets them as a batch, padded at their ends. Without
`row` the model works as before. Its forward method is replaced, not wrapped, so that ZeRO-3's hooks
and parameter names stay as they are.
"""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tasks.core.errors import ConfigError, TrainingError
from tasks.core.events import say
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.model import attention
from tasks.training.model.attention import SequenceParallel
from tasks.training.model.families import CAPPED, uncapped, why_padded
from tasks.training.model.head import Scaling, token_logprobs
from tasks.training.tokens.packing import Row
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
    was = getattr(engine, "module", engine).training
    last = int(row.ends.argmax())
    end = int(row.ends[last])
    start, own = end - int(row.positions[0, end]), row.owner == last
    engine.eval()  # dropout differs in every pass
    try:
        with torch.no_grad():
            out = engine(input_ids=row.ids[:, start : end + 1], use_cache=False).logits
            together = engine(row=row)
    finally:
        engine.train(was)
    if out.dim() == 2:  # scores
        alone, mine = out[:, 0].float(), together[last : last + 1]
    else:
        places, targets = row.wanted[own] - start, row.targets[own]
        alone = -nn.functional.cross_entropy(out[0, places].float(), targets, reduction="none")
        mine = together[own]
    dtype = next(p.dtype for p in engine.parameters() if p.is_floating_point())
    allowed = ROUNDING[dtype] * max(1.0, float(alone.abs().mean()))
    return float((mine - alone).abs().mean()), allowed
