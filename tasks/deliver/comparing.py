"""`merge.base=compare`: how far apart the two merges of one adapter are, for whoever has to choose.

The base as it is stored and the base after a round trip through 4 bits, each with the adapter on
it, unmerged, over the same texts. A merge equals them up to one rounding. Nothing is written.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tasks.deliver.engine import SHORTEST, encode_probes
from tasks.deliver.texts import probe_texts
from tasks.errors import ConfigError, DataError
from tasks.fingerprint import drift
from tasks.heldout import read_heldout
from tasks.scoring import ModelRef, ReferenceScorer

_CLEAR = 2.0
"""Standard errors by which two losses have to differ to tell anything."""
_LONGEST = 1024
"""Tokens of a conversation that are scored at most."""


@dataclass(frozen=True)
class Rows:
    """Token ids of what is scored.

    Attributes:
        prompts: what is given.
        replies: what the loss is taken on.
        trained: the user named them, so they may be rows of the training data.
    """

    prompts: Sequence[Sequence[int]]
    replies: Sequence[Sequence[int]]
    trained: bool

    @property
    def whole(self) -> list[list[int]]:
        """Prompts with their replies."""
        pairs = zip(self.prompts, self.replies, strict=True)
        return [[*prompt, *reply] for prompt, reply in pairs]


def read_rows(
    path: str | None, count: int, *, tokenizer: Path, limit: int, scorer: ReferenceScorer
) -> Rows:
    """Read what is scored: conversations of a `.jsonl` file, or plain texts.

    Args:
        path: the file; None for the built-in texts.
        count: rows at most.
        tokenizer: folder of the tokenizer, with a chat template for conversations.
        limit: tokens of a plain text at most.
        scorer: the transformers child, which has the tokenizer.

    Raises:
        ConfigError, DataError: unreadable, or too short.
    """
    if path is None or not path.endswith(".jsonl"):
        probes = encode_probes(scorer, tokenizer, probe_texts(path, count), limit)
        return Rows([one[:1] for one in probes], [one[1:] for one in probes], path is not None)
    try:
        rows = read_heldout(Path(path).expanduser())[:count]
    except DataError as error:
        raise ConfigError(
            f"smoke.texts={path}: {error.message}", hint='rows of {"messages": [...]}'
        ) from error
    prompts = scorer.encode(tokenizer, rows).tokens
    whole = scorer.encode_whole(tokenizer, [row["messages"] for row in rows])
    pairs = zip(prompts, whole, strict=True)
    fits = [(one, all_of[len(one) :]) for one, all_of in pairs if len(all_of) <= _LONGEST]
    replies = [(one, reply) for one, reply in fits if one and len(reply) >= SHORTEST]
    if not replies:
        raise DataError(f"{path}: no answer of two tokens in a conversation of {_LONGEST}")
    return Rows([one for one, _ in replies], [reply for _, reply in replies], trained=True)


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
        model: the base in full precision and the adapters on it.
        quantization: the 4 bits, as `ModelRef.quantization`.
        rows: what is scored; rows of the training data tell the most.
        scorer: the transformers child.
        is_reward: compare rewards in place of next tokens.
    """
    quantized = replace(model, quantization=quantization)
    if is_reward:
        yield from _rewards(*(scorer.rewards(one, rows.whole) for one in (model, quantized)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "original.fp"
        before = scorer.reference(model, rows.whole, path)
        moved = drift(before, scorer.fingerprint(quantized, path, Path(folder) / "dequantized.fp"))
    original, dequantized = (
        scorer.token_logprobs(one, rows.prompts, rows.replies) for one in (model, quantized)
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
    """Losses in nats per token, and whether they differ by more than their spread over texts."""
    counts = np.array([len(one) for one in original])
    gains = np.array([sum(two) - sum(one) for one, two in zip(original, dequantized, strict=True)])
    gain = gains.sum() / counts.sum()
    error = float(np.sqrt(((gains - gain * counts) ** 2).sum())) / counts.sum()
    losses = [-sum(map(sum, one)) / counts.sum() for one in (original, dequantized)]
    yield (
        f"  loss             original {losses[0]:.4f}, dequantized {losses[1]:.4f} nats per token; "
        f"difference {gain:+.4f} +- {error:.4f}"
    )
    if not trained:
        yield (
            "  only on rows of the training data does the loss tell which base training saw: "
            "smoke.texts=<.jsonl of messages, or one text a line>"
        )
    elif abs(gain) < _CLEAR * error:
        yield "  the loss does not tell which of them training saw; smoke.probes=<more rows> may"
    else:
        lower = "dequantized" if gain > 0 else "original"
        yield f"  if these are rows of the training data, training saw the {lower} base"


def _rewards(original: list[float], quantized: list[float]) -> Iterator[str]:
    apart = np.abs(np.subtract(original, quantized))
    spread = float(np.std(original)) or 1.0
    yield f"rewards of {len(original)} texts, base + adapter unmerged:"
    yield (
        f"  between the two  mean {apart.mean() / spread:.1e}, largest {apart.max() / spread:.1e} "
        "std of the rewards"
    )
