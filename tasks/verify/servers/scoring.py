"""Turn a server's log-probabilities into `Scores`, and choose positions where not all are asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tasks.verify.servers.server import Entry, Scores, ServerError

SAMPLED = 12
"""Positions per sequence where each costs a request."""
_NO_LOGPROB = 1e-3
EMPTY: Entry = (np.empty(0, np.int32), np.empty(0, np.float32))


def entry(values: Mapping[int, float | None]) -> Entry:
    """Return one position. Raises ServerError for values that are not log-probabilities.

    Args:
        values: natural-log probabilities by token id; None is left out.
    """
    pairs = {token: value for token, value in values.items() if value is not None}
    ids = np.fromiter(pairs, np.int64, len(pairs))
    try:
        logprobs = np.fromiter(pairs.values(), np.float64, len(pairs))
    except (TypeError, ValueError):
        raise ServerError(
            "the server's log-probabilities are not numbers", code="response"
        ) from None
    if np.isnan(logprobs).any() or (logprobs > _NO_LOGPROB).any():
        raise ServerError(
            "the server returns values that are not log-probabilities",
            details=[f"the largest is {logprobs.max():.4g}"],
            hint="vllm serve --logprobs-mode raw_logprobs",
            code="response",
        )
    order = np.argsort(-logprobs, kind="stable")
    return ids[order].astype(np.int32), logprobs[order].astype(np.float32)


def scores(length: int, entries: Mapping[int, Entry]) -> Scores:
    """Return the scores of a sequence of `length` tokens; positions without entry are empty."""
    chosen = [entries.get(at, EMPTY) for at in range(length - 1)]
    return Scores(tuple(ids for ids, _ in chosen), tuple(values for _, values in chosen))


def positions(length: int, most: int = SAMPLED) -> tuple[int, ...]:
    """Return at most `most` positions of a sequence, evenly spread, the last one included."""
    spread = np.linspace(length - 2, 0, min(most, length - 1)).round().astype(int)
    return tuple(sorted({int(at) for at in spread}))


def score_next(
    next_tokens: Callable[[Sequence[Sequence[int]]], Sequence[Entry]],
    sequences: Sequence[Sequence[int]],
    most: int = SAMPLED,
) -> list[Scores]:
    """Score a sample of positions by the next tokens after each prefix; the others are empty.

    Args:
        next_tokens: returns the most likely next tokens after each prefix.
        sequences: token ids, at least two each.
        most: positions of a sequence, at most.
    """
    chosen = [positions(len(ids), most) for ids in sequences]
    prefixes = [
        ids[: at + 1] for ids, places in zip(sequences, chosen, strict=True) for at in places
    ]
    entries = iter(next_tokens(prefixes))
    return [
        scores(len(ids), {at: next(entries) for at in places})
        for ids, places in zip(sequences, chosen, strict=True)
    ]
