"""`merge.base=compare`: measure how much the two possible merges of an adapter differ.

Compares the original base and the base quantized to 4 bits and dequantized, each with the adapter
unmerged, on the same texts. A merge equals them up to one rounding. Nothing is written.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tasks.core.errors import ConfigError, DataError
from tasks.delivery.reference import SHORTEST, encode_probes, probe_texts
from tasks.drift.fingerprint import drift
from tasks.evaluation.prompts import read_heldout
from tasks.evaluation.scoring import ModelRef, ReferenceScorer

_CLEAR = 2.0
"""Standard errors by which two losses must differ to be significant."""
_LONGEST = 1024
"""Longest conversation to score, in tokens."""


@dataclass(frozen=True)
class Rows:
    """Token ids of the texts to score."""

    prompts: Sequence[Sequence[int]]  # token ids of the context, not scored
    replies: Sequence[Sequence[int]]  # token ids of the responses, on which the loss is computed
    trained: bool  # True if the user passed the texts: they may be training data

    @property
    def whole(self) -> list[list[int]]:
        """Return each prompt with its response."""
        pairs = zip(self.prompts, self.replies, strict=True)
        return [[*prompt, *reply] for prompt, reply in pairs]


def read_rows(
    path: str | None, count: int, *, tokenizer: Path, limit: int, scorer: ReferenceScorer
) -> Rows:
    """Read the texts to score: conversations of a `.jsonl` file, or plain texts.

    Args:
        path: the file; None for the built-in texts.
        count: maximum number of rows.
        tokenizer: folder of the tokenizer, with a chat template for conversations.
        limit: maximum number of tokens of a plain text.
        scorer: the transformers child, which has the tokenizer.

    Raises:
        ConfigError, DataError: the file cannot be read, or its texts are too short.
    """
    if path is None or not path.endswith(".jsonl"):
        probes = encode_probes(scorer, tokenizer, probe_texts(path, count), limit)
        return Rows([ids[:1] for ids in probes], [ids[1:] for ids in probes], path is not None)
    try:
        rows = read_heldout(Path(path).expanduser())[:count]
    except DataError as error:
        raise ConfigError(
            f"smoke.texts={path}: {error.message}", hint='rows of {"messages": [...]}'
        ) from error
    prompts = scorer.encode(tokenizer, rows).tokens
    whole = scorer.encode_whole(tokenizer, rows)
    pairs = zip(prompts, whole, strict=True)
    fits = [(prompt, ids[len(prompt) :]) for prompt, ids in pairs if len(ids) <= _LONGEST]
    replies = [(prompt, reply) for prompt, reply in fits if prompt and len(reply) >= SHORTEST]
    if not replies:
        raise DataError(
            f"{path}: no conversation of up to {_LONGEST} tokens has a response of 2 tokens"
        )
    return Rows([prompt for prompt, _ in replies], [reply for _, reply in replies], trained=True)


def compare_bases(
    model: ModelRef,
    quantization: Mapping[str, Any],
    rows: Rows,
    *,
    scorer: ReferenceScorer,
    is_reward: bool,
) -> Iterator[str]:
    """Measure both and describe the difference, line by line.

    Args:
        quantization: settings of the 4 bits, as `ModelRef.quantization`.
        is_reward: compare rewards instead of next-token probabilities.
    """
    quantized = replace(model, quantization=quantization)
    if is_reward:
        yield from _rewards(*(scorer.rewards(ref, rows.whole) for ref in (model, quantized)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "original.fp"
        before = scorer.reference(model, path, probes=rows.whole)
        after = replace(quantized, float32=True)
        moved = drift(before, scorer.fingerprint(after, path, Path(folder) / "dequantized.fp"))
    original, dequantized = (
        scorer.token_logprobs(ref, rows.prompts, rows.replies) for ref in (model, quantized)
    )
    yield f"{before.positions} tokens of {len(rows.prompts)} texts, base + adapter unmerged:"
    yield (
        f"  between the two  mean KL {moved.mean_kl:.1e}, p95 KL {moved.p95_kl:.1e} nats, same "
        f"greedy token {moved.top1_agreement:.1%}"
    )
    yield from _losses(original, dequantized, trained=rows.trained)


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
            "smoke.texts=<.jsonl of messages, or one text a line>"
        )
    elif abs(gain) < _CLEAR * error:
        yield "  the loss does not tell which of them training saw; smoke.probes=<more rows> may"
    else:
        lower = "dequantized" if gain > 0 else "original"
        yield f"  if these are rows of the training data, training saw the {lower} base"


def _rewards(original: list[float], quantized: list[float]) -> Iterator[str]:
    """Yield the difference of rewards in standard deviations of the original's."""
    apart = np.abs(np.subtract(original, quantized))
    spread = float(np.std(original)) or 1.0
    yield f"rewards of {len(original)} texts, base + adapter unmerged:"
    yield (
        f"  between the two  mean {apart.mean() / spread:.1e}, largest {apart.max() / spread:.1e} "
        "std of the rewards"
    )
