"""The live engine's fingerprint.

Arithmetic that any other scorer can repeat bit for bit: each probe alone (batch of one, no padding,
no attention mask), eval mode, no autocast, logits turned to fp32, `log_softmax` over the whole
vocabulary. Measured a second time in padded batches, which is the engine's own noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tasks.fingerprint import TOP_K, Fingerprint, drift
from tasks.training.chat import Sample

PROBE_TOKENS = 64
NOISE_BATCH = 8


def choose_probes(samples: Sequence[Sample], count: int) -> tuple[tuple[int, ...], ...]:
    """The first `count` held-out samples, prompt and answer, cut to `PROBE_TOKENS`."""
    return tuple(s.ids[:PROBE_TOKENS] for s in samples[:count])


def fingerprint(engine: Any, probes: Sequence[Sequence[int]], device: torch.device) -> Fingerprint:
    """Measure the engine on the probes. All ranks take part, with the same inputs.

    Args:
        engine: DeepSpeed's engine around a causal model.
        probes: P token sequences of at least two tokens.
        device: where the model's inputs go.
    """
    engine.eval()
    with torch.no_grad():
        alone = [_one_by_one(engine, p, device) for p in probes]
        batched = [
            row
            for i in range(0, len(probes), NOISE_BATCH)
            for row in _padded(engine, probes[i : i + NOISE_BATCH], device)
        ]
    engine.train()
    first = _assemble(probes, torch.cat(alone))
    second = _assemble(probes, torch.cat(batched), first.ids)
    return replace(first, noise=drift(first, second).mean_kl)


def _one_by_one(engine: Any, probe: Sequence[int], device: torch.device) -> torch.Tensor:
    ids = torch.tensor([list(probe)], device=device)
    logits_TV = engine(input_ids=ids, use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits_TV.float(), dim=-1).cpu()


def _padded(
    engine: Any, probes: Sequence[Sequence[int]], device: torch.device
) -> list[torch.Tensor]:
    longest = max(len(p) for p in probes)
    ids = torch.zeros(len(probes), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, probe in enumerate(probes):
        ids[row, : len(probe)] = torch.tensor(probe)
        mask[row, : len(probe)] = 1
    logits_BTV = engine(
        input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False
    ).logits
    return [
        torch.log_softmax(logits_BTV[row, : len(probe) - 1].float(), dim=-1).cpu()
        for row, probe in enumerate(probes)
    ]


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
