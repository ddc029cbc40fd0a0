"""Measure how much a server's answers changed between two ways of asking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tasks.drift.fingerprint import DriftLimit
from tasks.verify.reference import Reference
from tasks.verify.servers.server import Entry, Generated, Scores, Server, UnsupportedError

_TIE = 0.5
"""Nats between two tokens that rounding may swap: four steps of bf16 between 16 and 32."""
_TINY = 1e-9
_LENGTH = 12
"""Tokens of a sequence that is asked for many times: a CPU computes 17 tokens per second."""
_ITEM = TypeVar("_ITEM")
_RESULT = TypeVar("_RESULT")


def change(before: Entry, after: Entry) -> float:
    """Return about KL(before || after) of one position, in nats, over the ids that are known.

    An id that `after` lacks is taken to be unchanged, as far as its list allows: the list has the
    most likely ids, so that no other is more likely than its last but one. The last may be the
    sequence's own token.
    """
    (ids, values), (other_ids, others) = before, after
    floor = float(others[-2:].max())
    known = dict(zip(other_ids.tolist(), others.tolist(), strict=True))
    p = np.exp(values.astype(np.float64))
    bound = np.minimum(values, floor)
    q = np.exp([known.get(token, bound[at]) for at, token in enumerate(ids.tolist())])
    rest_p, rest_q = max(1 - p.sum(), _TINY), max(1 - q.sum(), _TINY)
    kl = float((p * np.log(np.maximum(p, _TINY) / np.maximum(q, _TINY))).sum())
    return max(kl + rest_p * float(np.log(rest_p / rest_q)), 0.0)


def changes(before: Sequence[Scores], after: Sequence[Scores]) -> NDArray[np.float64]:
    """Return the change of every position that both measured, shape (N,)."""
    values = [
        change((a, b), (c, d))
        for x, y in zip(before, after, strict=True)
        for a, b, c, d in zip(x.ids, x.logprobs, y.ids, y.logprobs, strict=True)
        if len(a) and len(c)
    ]
    return np.array(values, np.float64)


def exceeds(values: NDArray[np.float64], limit: DriftLimit) -> bool:
    """Return True if changes are larger than the profile allows."""
    return bool(
        values.size and (values.mean() > limit.mean_kl or np.quantile(values, 0.95) > limit.p95_kl)
    )


def few(reference: Reference, count: int) -> list[tuple[int, ...]]:
    """Return the beginnings of some probes, of all kinds by turns."""
    kinds: dict[str, list[tuple[int, ...]]] = {}
    for probe in reference.probes:
        kinds.setdefault(probe.kind, []).append(probe.ids)
    turns = [ids for at in range(count) for kind in kinds.values() for ids in kind[at : at + 1]]
    return [ids[:_LENGTH] for ids in turns[:count]]


def together(
    work: Callable[[_ITEM], _RESULT], items: Sequence[_ITEM], workers: int
) -> list[_RESULT]:
    """Return the results of a function for all items, in their order, `workers` at a time."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, items))


def parted(
    server: Server,
    model: str,
    prompt: Sequence[int],
    before: Generated,
    after: Generated,
) -> bool | None:
    """Return True if two greedy responses differ by more than a tie; None if nobody can tell.

    Where they part, both tokens must be about as likely: else one of them was not greedy.
    """
    if before.ids is None or after.ids is None:
        return before.text != after.text
    size = min(len(before.ids), len(after.ids))
    if before.ids[:size] == after.ids[:size]:  # some servers leave out a final EOS
        return abs(len(before.ids) - len(after.ids)) > 1
    at = next(at for at in range(size) if before.ids[at] != after.ids[at])
    try:
        (entry,) = server.next_tokens(model, [[*prompt, *before.ids[:at]]])
    except UnsupportedError:
        return None
    known: dict[int, Any] = dict(zip(*(part.tolist() for part in entry), strict=True))
    low = [known.get(made.ids[at], -np.inf) for made in (before, after) if made.ids]
    return bool(entry[1].max() - min(low) > _TIE)
