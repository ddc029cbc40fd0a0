"""Rows that a quantised model is calibrated on, and the loss that it is judged by on others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tasks.core.contract import Check
from tasks.core.errors import DataError
from tasks.drift.fingerprint import DriftLimit, Fingerprint
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.serving.prompts import chat
from tasks.witness.plumbline_witness.prints import FINGERPRINT

TRAINING_ROWS = "train.jsonl"
HELDOUT_ROWS = "heldout.jsonl"
ROW_TOKENS = 512
"""Maximum number of tokens of a row."""


def row_tokens(
    scorer: ReferenceScorer, tokenizer: Path, data: Path | None, name: str, count: int, *,
    reference: Path,
) -> list[list[int]]:  # fmt: skip
    """Return the token ids of dataset rows, spread evenly over the file. Raises DataError."""
    if data is None:
        return [list(probe) for probe in Fingerprint.load(reference / FINGERPRINT).probes]
    path = data / name
    try:
        with path.open("rb") as file:
            total = sum(1 for _ in file)
        with path.open("rb") as file:
            chosen = islice(file, 0, None, max(1, total // count))
            rows = [json.loads(line) for line in islice(chosen, count)]
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not rows:
        raise DataError(f"{path} is empty: nothing to measure a quantised model on")
    if "text" in rows[0]:
        tokens = scorer.encode_texts(tokenizer, [row["text"] for row in rows], limit=ROW_TOKENS)
    elif all(_messages(row)[-1]["role"] == "assistant" for row in rows):
        tokens = scorer.encode_whole(tokenizer, [chat(_messages(row), row) for row in rows])
    else:
        tokens = scorer.encode(tokenizer, rows).tokens
    return [ids[:ROW_TOKENS] for ids in tokens if len(ids) > 1]


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    return list(row["messages"]) if "messages" in row else [*row["prompt"], *row["chosen"]]


def heldout_loss(
    scorer: ReferenceScorer,
    model: ModelRef,
    quantized: ModelRef,
    rows: Sequence[Sequence[int]],
    limit: DriftLimit,
) -> tuple[dict[str, float], Check]:
    """Compare the loss of a quantised model with that of the model in 16 bits.

    The loss may rise by the mean KL that the profile allows, since that is what the KL costs on
    text of the model itself, and by two standard errors of the difference. Above one nat per token
    the limit is that share of the loss: text that surprises a model moves more.

    Returns `quantized/loss/before` and `after`, in nats per token, and the verdict.
    """
    starts, rest = [row[:1] for row in rows], [row[1:] for row in rows]
    before, after = (
        [-logprob for row in scorer.token_logprobs(each, starts, rest) for logprob in row]
        for each in (model, quantized)
    )
    count = len(before)
    rises = [new - old for old, new in zip(before, after, strict=True)]
    rise = sum(rises) / count
    error = (sum((each - rise) ** 2 for each in rises) / count**2) ** 0.5
    loss = sum(before) / count
    allowed = limit.mean_kl * max(1.0, loss)
    check = Check(
        "held-out loss beside 16 bits",
        f"<= {loss:.4f} + {allowed:.2g} nats per token",
        f"{loss + rise:.4f} (+- {error:.1g}, {count} tokens)",
        ok=rise - 2 * error <= allowed,
    )
    return {"quantized/loss/before": loss, "quantized/loss/after": loss + rise}, check
