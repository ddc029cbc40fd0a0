"""Fingerprint of the live engine: log-probabilities of a causal model, scores of a reward model.

The arithmetic can be repeated bit for bit by any scorer: batches of one probe without padding or
mask, eval mode, no autocast, logits cast to fp32, `log_softmax` over the whole vocabulary. A second
measurement in padded batches gives the engine's own noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tasks.core.machine import measured_on
from tasks.drift.fingerprint import Fingerprint, ScorePrint, drift
from tasks.training.model.packed_model import model_of
from tasks.training.tokens.examples import Examples
from tasks.witness.plumbline_witness.prints import TOP_K, largest_steps

PROBE_TOKENS = 64
SCORED_TOKENS = 512
"""Tokens kept at the end of a probe for a reward model; nearly always the whole text."""
NOISE_BATCH = 8


def measure_fingerprint(
    engine: Any, examples: Examples, *, head: str, count: int, device: torch.device
) -> Fingerprint | ScorePrint:
    """Measure fingerprint or scores on the first evaluation examples. All ranks take part."""
    if head == "tokens":
        return fingerprint_of(engine, choose_probes(examples, count), device)
    return score_print(engine, choose_scored(examples, count), device)


def choose_probes(examples: Examples, count: int) -> tuple[tuple[int, ...], ...]:
    """Return the first sequence of the first `count` examples, cut to `PROBE_TOKENS` tokens."""
    chosen = range(min(count, len(examples)))
    return tuple(tuple(examples.sequence(i, 0)[0][:PROBE_TOKENS].tolist()) for i in chosen)


def choose_scored(examples: Examples, count: int) -> tuple[tuple[int, ...], ...]:
    """Return the last `SCORED_TOKENS` tokens of the first `count` examples, roles in turn."""
    roles = len(examples.roles)
    chosen = [(i, i % roles) for i in range(min(count, len(examples)))]
    return tuple(tuple(examples.sequence(i, r)[0][-SCORED_TOKENS:].tolist()) for i, r in chosen)


def score_print(engine: Any, probes: Sequence[Sequence[int]], device: torch.device) -> ScorePrint:
    """Score the probes with a reward model."""
    engine.eval()
    with torch.no_grad():
        alone = [_score(engine, [p], device)[0] for p in probes]
        batches = [probes[i : i + NOISE_BATCH] for i in range(0, len(probes), NOISE_BATCH)]
        batched = [score for batch in batches for score in _score(engine, batch, device)]
    engine.train()
    noise = sum(abs(a - b) for a, b in zip(alone, batched, strict=True)) / len(alone)
    kept, on = tuple(tuple(p) for p in probes), _measured_on(engine, device)
    return ScorePrint(kept, tuple(alone), "deepspeed", noise, on)


def _score(engine: Any, probes: Sequence[Sequence[int]], device: torch.device) -> list[float]:
    if len(probes) == 1:
        out = engine(input_ids=torch.tensor([list(probes[0])], device=device), use_cache=False)
        return [float(out.logits[0, 0])]
    # transformers scores at the last token that is not the padding id, so pad with an id that no
    # probe ends with.
    ends = {probe[-1] for probe in probes}
    config = model_of(engine.module).config.get_text_config()
    before, pad = config.pad_token_id, next(i for i in range(len(ends) + 1) if i not in ends)
    ids, mask = _batch(probes, pad, device)
    config.pad_token_id = pad
    try:
        out = engine(input_ids=ids, attention_mask=mask, use_cache=False)
    finally:
        config.pad_token_id = before
    return [float(score) for score in out.logits[:, 0]]


def fingerprint_of(
    engine: Any, probes: Sequence[Sequence[int]], device: torch.device
) -> Fingerprint:
    """Measure the fingerprint on the probes. All ranks take part, with the same inputs."""
    alone, steps, batched = [], [], []
    engine.eval()
    with torch.no_grad():
        for probe in probes:
            ids = torch.tensor([list(probe)], device=device)
            logits_TV = engine(input_ids=ids, use_cache=False).logits[0, :-1].float()
            steps.append(largest_steps(logits_TV.cpu().numpy()))
            alone.append(torch.log_softmax(logits_TV, dim=-1).cpu())
        for start in range(0, len(probes), NOISE_BATCH):
            batch = probes[start : start + NOISE_BATCH]
            ids, mask = _batch(batch, 0, device)
            logits_BTV = engine(input_ids=ids, attention_mask=mask, use_cache=False).logits
            for row, probe in enumerate(batch):
                logits_TV = logits_BTV[row, : len(probe) - 1].float()
                batched.append(torch.log_softmax(logits_TV, dim=-1).cpu())
    engine.train()
    first = _assemble(probes, torch.cat(alone))
    second = _assemble(probes, torch.cat(batched), first.ids)
    return replace(
        first,
        noise=drift(first, second).mean_kl,
        steps=np.concatenate(steps),
        measured_on=_measured_on(engine, device),
    )


def _measured_on(engine: Any, device: torch.device) -> dict[str, str]:
    return measured_on(device, model_of(engine.module).config._attn_implementation)


def _batch(
    probes: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids padded on the right, and their mask; both (B, T)."""
    longest = max(len(p) for p in probes)
    ids = torch.full((len(probes), longest), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, probe in enumerate(probes):
        ids[row, : len(probe)] = torch.tensor(probe)
        mask[row, : len(probe)] = 1
    return ids.to(device), mask.to(device)


def _assemble(
    probes: Sequence[Sequence[int]],
    logprobs_NV: torch.Tensor,
    ids: NDArray[np.int32] | None = None,
) -> Fingerprint:
    vocabulary = logprobs_NV.shape[1]
    if ids is None and vocabulary <= TOP_K:
        ids = np.tile(np.arange(vocabulary, dtype=np.int32), (len(logprobs_NV), 1))
    elif ids is None:
        ids = logprobs_NV.topk(TOP_K, dim=-1).indices.to(torch.int32).numpy()
    chosen = logprobs_NV.gather(1, torch.from_numpy(ids).long())
    return Fingerprint(
        probes=tuple(tuple(p) for p in probes),
        ids=ids,
        logprobs=chosen.numpy(),
        top1=logprobs_NV.argmax(dim=-1).to(torch.int32).numpy(),
        engine="deepspeed",
    )
