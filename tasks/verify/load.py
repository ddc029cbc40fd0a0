"""Check that a server answers the same, however it is asked.

batching       alone, and beside 31 other requests
prefix_cache   the same prompt again
long_prompts   prompt log-probabilities and generated tokens, beyond 256 tokens
streaming      streamed and not streamed
leak           base and adapters by turns (vLLM issues 42008 and 49063)
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.report import Cause, Row
from tasks.drift.fingerprint import DriftLimit
from tasks.verify.compare import Asked
from tasks.verify.server import Entry, Generated, Scores, UnsupportedError, parallel, score
from tasks.witness.plumbline_witness.prints import kl_by_position

CROWD = 32
"""Requests at the same time."""
CROWDS = (1, 8, CROWD)
_LENGTH = 12
"""Tokens of a sequence that is asked for many times: a CPU computes 17 tokens per second."""
_OTHERS = 2
"""Other adapters that are asked beside a model and its base."""
_PROMPTS, _TOKENS = 2, 12
_CACHED = 96
"""Tokens of a prompt for the prefix cache: several blocks of every server."""
_FROM, _LONG, _LONG_POSITIONS = 256, 384, 4
_TIE = 0.5
"""Nats between two tokens that rounding may swap: four steps of bf16 between 16 and 32."""


def batching(asked: Asked) -> Row:
    """Score the same sequences alone and in a crowd."""
    sequences = _beginnings(asked, 2 if asked.is_slow else 8)
    alone = score(asked.server, asked.model, sequences, workers=1)
    copies = -(-CROWD // len(sequences))
    crowd = score(asked.server, asked.model, sequences * copies, workers=CROWD)
    moved = _changes(_flat(alone * copies), _flat(crowd))
    text = f"alone and beside {CROWD - 1} other requests"
    return _judged(asked, "batching", "batch-variance", moved, text)


def prefix_cache(asked: Asked) -> Row:
    """Ask for the next token after prompts that the server has not seen, and ask again."""
    server, model = asked.server, asked.model
    length = min(_CACHED, (asked.length(model) or _CACHED) - 2)
    prompts = [_shuffled(asked, length) for _ in range(_PROMPTS)]
    first, again = (server.next(model, prompts, workers=1) for _ in range(2))
    with suppress(UnsupportedError):  # prompt log-probabilities are computed without a cache
        scored = server.score(model, [[*prompt, prompt[0]] for prompt in prompts])
        first, again = [*first, *(scores[-1] for scores in scored)], again * 2
    text = f"prompts of {length} tokens asked again"
    moved = _changes(first, again)
    return _judged(asked, "prefix-cache", "prefix-cache", moved, text, tokens=length)


def long_prompts(asked: Asked) -> Row:
    """Compare prompt log-probabilities with generated tokens, from 256 tokens on.

    vLLM issue 48271: both disagree there, so that probes of that length prove nothing.
    """
    name, server, model = "long-prompts", asked.server, asked.model
    size = min(_LONG, (asked.length(model) or _LONG) - 2)
    if size < _FROM + _LONG_POSITIONS:
        return Row(name, "unknown", f"the server takes {size + 2} tokens only")
    sequence = _shuffled(asked, size)
    places = np.linspace(_FROM - 1, size - 2, _LONG_POSITIONS).round().astype(int).tolist()
    (scored,) = server.score(model, [sequence])
    generated = server.next(model, [sequence[: at + 1] for at in places], workers=1)
    moved = _changes([scored[at] for at in places], generated)
    text = f"prompt log-probabilities and generation between {_FROM} and {size} tokens"
    return _judged(asked, name, name, moved, text, positions=len(places))


def _changes(before: Sequence[Entry], after: Sequence[Entry]) -> NDArray[np.float64]:
    """Return about KL(before || after) of each position where both list several ids, in nats.

    An id that `after` lacks is taken to be unchanged, as far as its list allows: no other id is
    more likely than its last but one. The last may be the sequence's own token.
    """
    changes = []
    for (ids, old), (others, new) in zip(before, after, strict=True):
        if min(len(ids), len(others)) > 1:
            known = dict(zip(others.tolist(), new.tolist(), strict=True))
            bound = np.minimum(old, new[-2:].max())
            q = np.array([known.get(token, bound[at]) for at, token in enumerate(ids.tolist())])
            p, q = np.exp(old.astype(np.float64)), np.exp(q.astype(np.float64))
            changes.append(float(kl_by_position(p[None], q[None])[0]))
    return np.array(changes)


def _flat(scores: Sequence[Scores]) -> list[Entry]:
    return [entry for each in scores for entry in each]


def _mean(moved: NDArray[np.float64]) -> float:
    return float(moved.mean()) if moved.size else 0.0


def _exceeds(moved: NDArray[np.float64], limit: DriftLimit) -> bool:
    """Return True if changes are larger than the profile allows."""
    return bool(
        moved.size and (moved.mean() > limit.mean_kl or np.quantile(moved, 0.95) > limit.p95_kl)
    )


def _judged(
    asked: Asked, name: str, cause: str, moved: NDArray[np.float64], text: str, **measured: float
) -> Row:
    """Return the verdict on positions that should have the same answers."""
    if not moved.size:
        return Row(name, "unknown", "the server returned no log-probabilities to compare")
    limits = {"mean_kl": asked.limit.mean_kl}
    measured = {"mean_kl": float(moved.mean()), **measured}
    text = f"{text}: {moved.mean():.1e} nats apart (limit {asked.limit.mean_kl:.1e})"
    if _exceeds(moved, asked.limit):
        return Row(name, "fault", text, measured, _cause(cause), limits)
    return Row(name, "ok", text, measured, limit=limits)


def streaming(asked: Asked) -> Row:
    """Compare greedy responses that are streamed with those that are not."""
    name, unclear = "streaming", 0
    prompts = [ids[: max(1, len(ids) // 2)] for ids in _beginnings(asked, _PROMPTS)]
    measured = {"prompts": len(prompts)}
    for prompt in prompts:
        whole = _greedy(asked, asked.model, prompt)
        streamed = _greedy(asked, asked.model, prompt, stream=True)
        differs = _parted(asked, asked.model, prompt, whole, streamed)
        if differs and _greedy(asked, asked.model, prompt) == whole:  # it repeats itself
            text = f"not streamed {whole.text[:40]!r}, streamed {streamed.text[:40]!r}"
            return Row(name, "fault", text, measured, _cause(name))
        unclear += differs is not False
    if unclear:
        text = f"greedy responses to {unclear} of {len(prompts)} prompts are not repeatable"
        return Row(name, "unknown", text, measured)
    return Row(name, "ok", f"{len(prompts)} responses are the same, streamed and not", measured)


def leak(asked: Asked) -> Row:
    """Ask base and adapters by turns, 1, 8 and 32 at a time; each has to answer as it did alone."""
    limit, parents = asked.limit, {entry.name: entry.parent for entry in asked.server.models()}
    parent = parents.get(asked.model) or asked.base
    others = [name for name in parents if name not in (asked.model, parent)]
    names = list(dict.fromkeys([*([parent] if parent else []), asked.model, *others[:_OTHERS]]))
    if len(names) < 2:
        return Row("leak", "unknown", "the server has no second model to mix it up with")
    sequences = _beginnings(asked, 1 if asked.is_slow else 4)
    alone = {name: _flat(score(asked.server, name, sequences, workers=1)) for name in names}
    apart = max(_mean(_changes(alone[names[0]], alone[name])) for name in names[1:])
    measured: dict[str, float | str] = {"models": len(names), "apart": apart}
    if apart <= limit.mean_kl:
        text = f"models of this server answer alike ({apart:.1e} nats): a leak is invisible"
        return Row("leak", "unknown", text, measured)
    limits = {f"kl_{crowd}": limit.mean_kl for crowd in CROWDS}
    for crowd in CROWDS:
        mixed = _interleaved(asked, names, sequences, crowd)
        moved = {name: _changes(alone[name], mixed[name]) for name in names}
        measured[f"kl_{crowd}"] = max(map(_mean, moved.values()))
        for name in names:
            if _exceeds(moved[name], limit):
                near = {other: _mean(_changes(alone[other], mixed[name])) for other in names}
                text = (
                    f"{name} answers {near[name]:.2e} nats apart from itself beside requests for "
                    f"other models, {crowd} at a time, nearest to {min(near, key=near.__getitem__)}"
                )
                return Row("leak", "fault", text, measured, _mixed(parents, name), limits)
    prompt = sequences[0][: _LENGTH // 2]
    responses = {name: _greedy(asked, name, prompt) for name in names}
    jobs = [*names] * 4
    mixed_up = parallel(lambda name: _greedy(asked, name, prompt), jobs, len(jobs))
    for name, made in zip(jobs, mixed_up, strict=True):
        if _parted(asked, name, prompt, responses[name], made):
            text = f"{name} generates other tokens beside requests for other models"
            return Row("leak", "fault", text, measured, _mixed(parents, name), limits)
    text = f"{', '.join(names)} answer by turns, up to {CROWD} at a time, as they do alone"
    return Row("leak", "ok", text, measured, limit=limits)


def _interleaved(
    asked: Asked, names: Sequence[str], sequences: Sequence[Sequence[int]], crowd: int
) -> Mapping[str, list[Entry]]:
    """Score all sequences with all models by turns; return the last answer of each."""
    jobs = [(name, ids) for ids in sequences for name in names]
    jobs = jobs * -(-crowd // len(jobs))

    def ask(job: tuple[str, Sequence[int]]) -> Scores:
        # These may use a prompt cache, as the requests of users do.
        return score(asked.server, job[0], [job[1]], workers=1, cache=True)[0]

    by_job = dict(zip(jobs, parallel(ask, jobs, crowd), strict=True))
    return {name: _flat([by_job[name, ids] for ids in sequences]) for name in names}


def _parted(
    asked: Asked, model: str, prompt: Sequence[int], before: Generated, after: Generated
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
        (entry,) = asked.server.next(model, [[*prompt, *before.ids[:at]]])
    except UnsupportedError:
        return None
    known: dict[int, Any] = dict(zip(entry.ids.tolist(), entry.logprobs.tolist(), strict=True))
    low = min(known.get(ids[at], -np.inf) for ids in (before.ids, after.ids))
    return bool(max(known.values()) - low > _TIE)


def _greedy(asked: Asked, model: str, prompt: Sequence[int], *, stream: bool = False) -> Generated:
    return asked.server.generate(model, prompt, _TOKENS, stream=stream, temperature=0)[0]


def _beginnings(asked: Asked, count: int) -> list[tuple[int, ...]]:
    """Return the beginnings of some probes, of all kinds by turns."""
    kinds: dict[str, list[tuple[int, ...]]] = {}
    for probe in asked.reference.probes:
        kinds.setdefault(probe.kind, []).append(probe.ids)
    turns = [ids for at in range(count) for kind in kinds.values() for ids in kind[at : at + 1]]
    return [ids[:_LENGTH] for ids in turns[:count]]


def _shuffled(asked: Asked, size: int) -> list[int]:
    """Return tokens of the probes in an order that no server has seen."""
    tokens = [token for ids in asked.reference.sequences for token in ids]
    return [random.choice(tokens) for _ in range(size)]


def _mixed(parents: Mapping[str, str | None], name: str) -> tuple[Cause, ...]:
    return _cause("adapters-mixed" if parents.get(name) else "lora-leak")


def _cause(code: str) -> tuple[Cause, ...]:
    return (Cause(code, *_CAUSES[code]),)


_CAUSES = {
    "batch-variance": (
        "the answer to a prompt depends on the requests beside it, beyond rounding",
        "a newer version of the server, or another attention backend; on vLLM "
        "VLLM_BATCH_INVARIANT=1",
    ),
    "prefix-cache": (
        "the prefix cache returns something else than it was given",
        "vllm serve --no-enable-prefix-caching, and a newer version of the server",
    ),
    "long-prompts": (
        "the server computes prompt log-probabilities otherwise than generated tokens",
        "a newer version of the server (vLLM issue 48271); --no-enable-chunked-prefill",
    ),
    "streaming": (
        "the server streams another response than it returns at once",
        "a newer version of the server; a parser or a proxy may change the parts",
    ),
    "lora-leak": (
        "an adapter leaks into requests for the base",
        "serve the base by a server of its own (vLLM issues 42008 and 49063); vLLM 0.32 on a CPU "
        "keeps apart with --max-loras <one more than adapters>, llama.cpp with --no-cache-prompt",
    ),
    "adapters-mixed": (
        "requests for one adapter are answered by another one or by the base",
        "vllm serve --max-loras <number of adapters>; llama-server --no-cache-prompt (llama.cpp "
        "issue 26207); or one server per adapter",
    ),
}
"""Text and hint by code."""
