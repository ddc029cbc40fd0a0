"""`merge.base=compare`: measure how much the two possible merges of an adapter differ.

Compares the original base and the base quantized to 4 bits and dequantized, each with the adapter
unmerged, on the same texts. A merge equals them up to one rounding. Nothing is written.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tasks.drift.fingerprint import drift
from tasks.evaluation.scoring import ModelRef, ReferenceScorer

_CLEAR = 2.0
"""Standard errors by which two losses must differ to be significant."""


def compare_bases(
    model: ModelRef,
    quantization: Mapping[str, Any],
    texts: list[list[int]],
    *,
    scorer: ReferenceScorer,
    is_reward: bool,
    trained: bool,
) -> Iterator[str]:
    """Measure both and describe the difference, line by line.

    Args:
        quantization: settings of the 4 bits, as `ModelRef.quantization`.
        texts: token ids of each text.
        is_reward: compare rewards instead of next-token probabilities.
        trained: True if the user passed the texts: they may be training data.
    """
    quantized = replace(model, quantization=quantization)
    if is_reward:
        original, other = (np.array(scorer.rewards(ref, texts)) for ref in (model, quantized))
        apart, spread = np.abs(original - other), float(np.std(original)) or 1.0
        yield (
            f"rewards of {len(texts)} texts, base + adapter unmerged: between the two mean "
            f"{apart.mean() / spread:.1e}, largest {apart.max() / spread:.1e} std of the rewards"
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "original.fp"
        before = scorer.reference(model, path, probes=texts)
        after = replace(quantized, float32=True)
        moved = drift(before, scorer.fingerprint(after, path, Path(folder) / "dequantized.fp"))
    starts, rest = [ids[:1] for ids in texts], [ids[1:] for ids in texts]
    losses = [scorer.token_logprobs(ref, starts, rest) for ref in (model, quantized)]
    yield f"{before.positions} tokens of {len(texts)} texts, base + adapter unmerged:"
    yield (
        f"  between the two  mean KL {moved.mean_kl:.1e}, p95 KL {moved.p95_kl:.1e} nats, same "
        f"greedy token {moved.top1_agreement:.1%}"
    )
    yield from _losses(*losses, trained=trained)


def _losses(
    original: list[list[float]], dequantized: list[list[float]], *, trained: bool
) -> Iterator[str]:
    """Yield the losses in nats per token, and whether their difference is significant."""
    counts = np.array([len(logprobs) for logprobs in original])
    gains = np.array([sum(b) - sum(a) for a, b in zip(original, dequantized, strict=True)])
    gain = gains.sum() / counts.sum()
    error = float(np.sqrt(((gains - gain * counts) ** 2).sum())) / counts.sum()
    losses = [-sum(map(sum, logprobs)) / counts.sum() for logprobs in (original, dequantized)]
    yield (
        f"  loss             original {losses[0]:.4f}, dequantized {losses[1]:.4f} nats per token; "
        f"difference {gain:+.4f} +- {error:.4f}"
    )
    if not trained:
        yield (
            "  the loss tells which base training saw only on rows of the training data: "
            "smoke.texts=<one text a line>"
        )
    elif abs(gain) < _CLEAR * error:
        yield "  the loss does not tell which of them training saw; smoke.probes=<more rows> may"
    else:
        lower = "dequantized" if gain > 0 else "original"
        yield f"  if these are rows of the training data, training saw the {lower} base"
