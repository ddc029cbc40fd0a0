"""Fingerprint of the live engine: log-probabilities of a causal model, scores of a reward model.

The arithmetic can be repeated bit for bit by any scorer: batches of one probe without padding or
mask, eval mode, no autocast, logits cast to fp32, `log_softmax` over the whole vocabulary. A second
measurement in padded batches gives the engine's own noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from tasks.core.machine import measured_on
from tasks.drift.fingerprint import Fingerprint, ScorePrint, drift
from tasks.training.model.packed_model import evaluating, model_of
from tasks.training.tokens.examples import Examples
from tasks.witness.plumbline_witness.measure import of_logits

PROBE_TOKENS = 64
SCORED_TOKENS = 512
"""Tokens kept at the end of a probe for a reward model; nearly always the whole text."""
NOISE_BATCH = 8
Probes = Sequence[Sequence[int]]


def choose_probes(examples: Examples, count: int) -> tuple[tuple[int, ...], ...]:
    """Return the first sequence of the first `count` examples, cut to `PROBE_TOKENS` tokens."""
    chosen = range(min(count, len(examples)))
    return tuple(tuple(examples.sequence(i, 0)[0][:PROBE_TOKENS].tolist()) for i in chosen)


def choose_scored(examples: Examples, count: int) -> tuple[tuple[int, ...], ...]:
    """Return the last `SCORED_TOKENS` tokens of the first `count` examples, roles in turn."""
    roles = len(examples.roles)
    chosen = [(i, i % roles) for i in range(min(count, len(examples)))]
    return tuple(tuple(examples.sequence(i, r)[0][-SCORED_TOKENS:].tolist()) for i, r in chosen)


def score_print(engine: Any, probes: Probes, device: torch.device) -> ScorePrint:
    """Score the probes with a reward model."""
    # transformers scores at the last token that is not the padding id, so batches are padded with
    # an id that no probe ends with.
    ends = {probe[-1] for probe in probes}
    config, pad = model_of(engine.module).config.get_text_config(), 0
    while pad in ends:
        pad += 1
    with evaluating(engine):
        alone = [float(logits[0, 0]) for logits in _alone(engine, probes, device)]
        before, config.pad_token_id = config.pad_token_id, pad
        batches = list(_in_batches(engine, probes, device, pad))
        config.pad_token_id = before
    batched = [float(score) for logits in batches for score in logits[:, 0]]
    noise = sum(abs(a - b) for a, b in zip(alone, batched, strict=True)) / len(alone)
    kept, on = tuple(tuple(p) for p in probes), _measured_on(engine, device)
    return ScorePrint(kept, tuple(alone), "deepspeed", noise, on)


def fingerprint_of(engine: Any, probes: Probes, device: torch.device) -> Fingerprint:
    """Measure the fingerprint on the probes. All ranks take part, with the same inputs."""
    with evaluating(engine):
        parts = [of_logits(logits[0, :-1].float()) for logits in _alone(engine, probes, device)]
        ids, logprobs, top1, steps = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        kept, batched, start = tuple(tuple(p) for p in probes), [], 0
        for number, logits_BTV in enumerate(_in_batches(engine, probes, device)):
            for row, probe in enumerate(probes[number * NOISE_BATCH : (number + 1) * NOISE_BATCH]):
                logits_TV = logits_BTV[row, : len(probe) - 1].float()
                batched.append(of_logits(logits_TV, ids[start : start + len(logits_TV)]))
                start += len(logits_TV)
    _, again, other, _ = (np.concatenate(arrays) for arrays in zip(*batched, strict=True))
    first = Fingerprint(kept, ids, logprobs, top1, engine="deepspeed")
    return replace(
        first,
        noise=drift(first, replace(first, logprobs=again, top1=other)).mean_kl,
        steps=steps,
        measured_on=_measured_on(engine, device),
    )


def _alone(engine: Any, probes: Probes, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield the logits of each probe, in a batch of its own without a mask."""
    for probe in probes:
        ids = torch.tensor([list(probe)], device=device)
        yield engine(input_ids=ids, use_cache=False).logits


def _in_batches(
    engine: Any, probes: Probes, device: torch.device, pad: int = 0
) -> Iterator[torch.Tensor]:
    """Yield the logits of `NOISE_BATCH` probes at a time, padded on the right and masked."""
    for start in range(0, len(probes), NOISE_BATCH):
        batch = [torch.tensor(probe) for probe in probes[start : start + NOISE_BATCH]]
        ids = pad_sequence(batch, batch_first=True, padding_value=pad).to(device)
        mask = pad_sequence([torch.ones_like(probe) for probe in batch], batch_first=True)
        yield engine(input_ids=ids, attention_mask=mask.to(device), use_cache=False).logits


def _measured_on(engine: Any, device: torch.device) -> dict[str, str]:
    return measured_on(device, model_of(engine.module).config._attn_implementation)
