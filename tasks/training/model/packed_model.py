"""A transformers model that takes packed rows: log-probabilities of wanted tokens, or scores.

`model(row=row)` runs the trunk once over the row. A causal model answers with the log-probability
of each supervised token, its head applied to those places alone (`head.py`), or with what else is
`Asked` of it; a model with a score head answers with one score a sequence.
Without `row` the model is what it was. The forward pass of the model itself is exchanged, not
wrapped, so that ZeRO-3's hooks and every parameter's name stay where they are.
"""

from __future__ import annotations

import inspect
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tasks.core.errors import ConfigError, TrainingError
from tasks.training.model import attention
from tasks.training.model.head import Scaling, token_logprobs, token_logprobs_and_entropies
from tasks.training.model.packable import unpackable
from tasks.training.tokens.packing import Row

ROUNDING = {torch.float32: 2.0**-16, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""How far two ways to compute the same answer may lie apart, relative to it, averaged over tokens:
four times the rounding of bf16, for the layers in between; fp32 has room for longer sums."""


@dataclass(frozen=True)
class Asked:
    """What a causal model is asked for each supervised token of a row.

    Attributes:
        temperature: that log-probabilities are taken at.
        entropy: the distribution's entropy beside the log-probability.
        states: the hidden state that the token was predicted from, and nothing else.
    """

    temperature: float = 1.0
    entropy: bool = False
    states: bool = False


PLAIN = Asked()


def take_rows(model: Any) -> None:
    """Teach a causal model, or one with a score head, to take packed rows.

    Args:
        model: a transformers model, not yet given to peft or DeepSpeed.

    Raises:
        ConfigError: sequences would not be kept apart in this family.
    """
    _require_packable(model)
    original = model.forward
    answer = _scores if hasattr(model, "score") else _of_tokens

    def forward(
        self: Any, *args: Any, row: Row | None = None, asked: Asked = PLAIN, **kwargs: Any
    ) -> Any:
        if row is None:
            return original(*args, **kwargs)
        for unused in ("input_ids", "attention_mask", "inputs_embeds", "labels"):
            kwargs.pop(unused, None)
        extra: dict[str, Any] = {}
        name = self.config._attn_implementation
        if name == attention.NAME:
            extra["buckets"] = row.buckets
        elif name.startswith("flash_attention"):
            extra.update(attention.flash_bounds(row))
        elif not self._supports_attention_backend:
            extra["attention_mask"] = _block_mask(row, self.dtype)
        out = self.base_model(
            input_ids=row.ids, position_ids=row.positions, use_cache=False, **extra
        )
        return answer(self, out.last_hidden_state[0], row, asked)

    model.forward = types.MethodType(forward, model)
    if model._supports_attention_backend and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(attention.register())


def model_of(module: Any) -> Any:
    """The transformers model within peft's wrapper, or itself."""
    return module.get_base_model() if hasattr(module, "get_base_model") else module


def give_back_attention(model: Any, name: str) -> None:
    """Exchange the packed attention for transformers' own, by which fingerprints are taken."""
    if model.config._attn_implementation == attention.NAME:
        model.set_attn_implementation(name)


def _scores(model: Any, hidden_TH: torch.Tensor, row: Row, asked: Asked) -> torch.Tensor:
    scores: torch.Tensor = model.score(hidden_TH[row.ends])
    return scores[:, 0].float()


def _of_tokens(model: Any, hidden_TH: torch.Tensor, row: Row, asked: Asked) -> Any:
    """(N,) log-probabilities; with the entropies where they are asked for; or (N, H) states."""
    hidden = hidden_TH[row.wanted]
    if asked.states:
        return hidden
    scaling, head = Scaling.of(model.config, asked.temperature), model.get_output_embeddings()
    measure = token_logprobs_and_entropies if asked.entropy else token_logprobs
    return measure(head, hidden, row.targets, scaling)


def _require_packable(model: Any) -> None:
    found = unpackable(model.config.to_dict(), model.config._attn_implementation)
    if found is not None:
        raise ConfigError(found.problem, hint=found.hint)
    takes = inspect.signature(model.base_model.forward).parameters
    stateful = getattr(model, "_is_stateful", False)
    if stateful or "position_ids" not in takes:
        why = "carries a state along the row" if stateful else "takes no position_ids"
        raise ConfigError(
            f"{type(model).__name__} {why}, so that packed sequences would run into each other",
            hint="models whose layers are full or sliding-window attention can be trained",
        )


def _block_mask(row: Row, dtype: torch.dtype) -> torch.Tensor:
    """(1, 1, T, T): 0 within a sequence and backwards, the lowest number elsewhere."""
    number = (row.positions[0] == 0).cumsum(0)
    place = torch.arange(len(number), device=number.device)
    seen = (number[:, None] == number[None]) & (place[:, None] >= place[None])
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[None, None]


def require_same(engine: Any, row: Row) -> None:
    """Compare the packed pass with the model's own forward pass on the last sequence of a row.

    A family may mix neighbours, or do something to its logits, in ways that are not known here;
    then nothing is trained. Two passes; every rank takes part, with the same row.

    Args:
        engine: DeepSpeed's, or a model that `take_rows` has taught.
        row: at least two short sequences, see `packing.trial_row`.

    Raises:
        TrainingError: log-probabilities or scores differ by more than rounding explains.
    """
    was = engine.module.training if hasattr(engine, "module") else engine.training
    engine.eval()  # dropout draws anew in every pass
    try:
        with torch.no_grad():
            last = int(row.ends.argmax())
            alone = _alone(engine, row, last)
            packed = engine(row=row)
    finally:
        engine.train(was)
    packed = packed[last : last + 1] if len(packed) == row.sequences else packed[row.owner == last]
    dtype = next(p.dtype for p in engine.parameters() if p.is_floating_point())
    allowed = ROUNDING[dtype] * max(1.0, float(alone.abs().mean()))
    differs = float((packed - alone).abs().mean())
    if not differs <= allowed:
        raise TrainingError(
            f"packed, a sequence differs from the model's own forward pass by {differs:.3g} on "
            f"average; {allowed:.3g} is rounding",
            hint="the family mixes neighbours, or changes its logits in a way that packing does "
            "not know; please report it",
        )


def _alone(engine: Any, row: Row, sequence: int) -> torch.Tensor:
    end = int(row.ends[sequence])
    start = end - int(row.positions[0, end])
    out = engine(input_ids=row.ids[:, start : end + 1], use_cache=False).logits
    if out.dim() == 2:
        return out[:, 0].float()
    mine = row.owner == sequence
    places, targets = row.wanted[mine] - start, row.targets[mine]
    return -nn.functional.cross_entropy(out[0, places].float(), targets, reduction="none")
