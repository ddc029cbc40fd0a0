"""Check that a server answers the same, however it is asked: alone, in a crowd, again, streamed.

batching       alone, and beside 31 other requests
prefix_cache   the same prompt again
long_prompts   prompt log-probabilities and generated tokens, beyond 256 tokens
streaming      streamed and not streamed
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from tasks.verify.answers import Answers
from tasks.verify.check import Cause, Check
from tasks.verify.checks.changes import change, changes, exceeds, few, parted
from tasks.verify.reference import Reference
from tasks.verify.servers.server import Entry, Generated, Server

CROWD = 32
"""Requests at the same time."""
_SEQUENCES = 8
_PROMPTS, _TOKENS = 2, 12
_CACHED = 96
"""Tokens of a prompt for the prefix cache: several blocks of every server."""
_FROM, _LONG = 256, 384
_LONG_POSITIONS = 4


def batching(answers: Answers, model: str, base: str | None) -> Check:
    """Score the same sequences alone and in a crowd."""
    server, limit = answers.server, answers.limit
    sequences = few(answers.reference, _SEQUENCES if server.abilities.prompt_logprobs else 2)
    alone = server.score(model, sequences, workers=1)
    copies = -(-CROWD // len(sequences))
    moved = changes(alone * copies, server.score(model, sequences * copies, workers=CROWD))
    if not moved.size:
        return Check("batching", "unknown", "the server returned no log-probabilities")
    measured, limits = {"mean_kl": float(moved.mean())}, {"mean_kl": limit.mean_kl}
    if exceeds(moved, limit):
        text = f"beside {CROWD - 1} other requests the answers move by {moved.mean():.2e} nats"
        return Check("batching", "fault", text, measured, limits, (_CAUSES["batch-variance"],))
    text = f"alone and beside {CROWD - 1} other requests: {moved.mean():.1e} nats apart"
    return Check("batching", "ok", text, measured, limits)


def prefix_cache(answers: Answers, model: str, base: str | None) -> Check:
    """Ask for the next token after prompts that the server has not seen, and ask again."""
    server, limit = answers.server, answers.limit
    length = min(_CACHED, (answers.length(model) or _CACHED) - 2)
    prompts = [_shuffled(answers.reference, length) for _ in range(_PROMPTS)]
    first = server.next_tokens(model, prompts, workers=1)
    again = server.next_tokens(model, prompts, workers=1)
    pairs = [(a, b) for a, b in zip(first, again, strict=True) if len(a[0]) and len(b[0])]
    if not pairs:
        return Check("prefix-cache", "unknown", "the server returned no log-probabilities")
    moved = [change(a, b) for a, b in pairs]
    if server.abilities.prompt_logprobs > 1:
        # These are computed without a cache.
        scored = server.score(model, [[*prompt, prompt[0]] for prompt in prompts])
        moved += [
            change((scores.ids[-1], scores.logprobs[-1]), entry)
            for scores, entry in zip(scored, again, strict=True)
        ]
    values = np.array(moved)
    measured = {"mean_kl": float(values.mean()), "tokens": length}
    limits = {"mean_kl": limit.mean_kl}
    if exceeds(values, limit):
        text = f"a prompt that was seen before is answered {measured['mean_kl']:.2e} nats apart"
        return Check("prefix-cache", "fault", text, measured, limits, (_CAUSES["prefix-cache"],))
    text = f"prompts of {length} tokens asked again: {measured['mean_kl']:.1e} nats apart"
    return Check("prefix-cache", "ok", text, measured, limits)


def long_prompts(answers: Answers, model: str, base: str | None) -> Check:
    """Compare prompt log-probabilities with generated tokens, from 256 tokens on.

    vLLM issue 48271: both disagree there, so that probes of that length prove nothing.
    """
    server, limit = answers.server, answers.limit
    if server.abilities.prompt_logprobs < 2 or not server.abilities.next_logprobs:
        reason = "the server returns either prompt log-probabilities or next tokens, not both"
        return Check("long-prompts", "unknown", reason)
    size = min(_LONG, (answers.length(model) or _LONG) - 2)
    if size < _FROM + _LONG_POSITIONS:
        return Check("long-prompts", "unknown", f"the server takes {size + 2} tokens only")
    sequence = _shuffled(answers.reference, size)
    places = np.linspace(_FROM - 1, size - 2, _LONG_POSITIONS).round().astype(int).tolist()
    (scored,) = server.score(model, [sequence])
    generated = server.next_tokens(model, [sequence[: at + 1] for at in places], workers=1)
    moved, other = [], 0
    for at, entry in zip(places, generated, strict=True):
        prompt: Entry = (scored.ids[at], scored.logprobs[at])
        moved.append(change(prompt, entry))
        other += bool(prompt[0][0] != entry[0][0])
    values = np.array(moved)
    measured = {"mean_kl": float(values.mean()), "positions": len(places), "other_top": other}
    limits = {"mean_kl": limit.mean_kl}
    if exceeds(values, limit):
        text = (
            f"prompt log-probabilities and generation are {measured['mean_kl']:.2e} nats apart "
            f"between {_FROM} and {size} tokens"
        )
        return Check("long-prompts", "fault", text, measured, limits, (_CAUSES["long-prompts"],))
    text = f"prompts of {_FROM} to {size} tokens: {measured['mean_kl']:.1e} nats apart"
    return Check("long-prompts", "ok", text, measured, limits)


def streaming(answers: Answers, model: str, base: str | None) -> Check:
    """Compare greedy responses that are streamed with those that are not."""
    server = answers.server
    prompts = [ids[: max(1, len(ids) // 2)] for ids in few(answers.reference, _PROMPTS)]
    untold, tokens = 0, 0
    for prompt in prompts:
        whole, streamed = (_greedy(server, model, prompt, stream) for stream in (False, True))
        differs = parted(server, model, prompt, whole, streamed)
        tokens += len(whole.ids or ())
        if differs and _greedy(server, model, prompt, False) != whole:
            differs = None  # the server does not repeat itself either
        if differs:
            text = f"not streamed {whole.text[:40]!r}, streamed {streamed.text[:40]!r}"
            causes = (_CAUSES["streaming"],)
            return Check("streaming", "fault", text, {"prompts": len(prompts)}, causes=causes)
        untold += differs is None
    measured = {"prompts": len(prompts), "tokens": tokens}
    if untold:
        reason = f"greedy responses to {untold} of {len(prompts)} prompts are not repeatable"
        return Check("streaming", "unknown", reason, measured)
    text = f"{len(prompts)} responses are the same, streamed and not"
    return Check("streaming", "ok", text, measured)


def _greedy(server: Server, model: str, prompt: Sequence[int], stream: bool) -> Generated:
    return server.generate(model, prompt, _TOKENS, stream=stream, temperature=0)[0]


def _shuffled(reference: Reference, size: int) -> list[int]:
    """Return tokens of the probes in an order that no server has seen."""
    tokens = [token for ids in reference.sequences for token in ids]
    return [random.choice(tokens) for _ in range(size)]


_CAUSES = {
    cause.code: cause
    for cause in (
        Cause(
            "batch-variance",
            "the answer to a prompt depends on the requests beside it, beyond rounding",
            "a newer version of the server, or another attention backend; on vLLM "
            "VLLM_BATCH_INVARIANT=1",
        ),
        Cause(
            "prefix-cache",
            "the prefix cache returns something else than it was given",
            "vllm serve --no-enable-prefix-caching, and a newer version of the server",
        ),
        Cause(
            "long-prompts",
            "the server computes prompt log-probabilities otherwise than generated tokens",
            "a newer version of the server (vLLM issue 48271); --no-enable-chunked-prefill",
        ),
        Cause(
            "streaming",
            "the server streams another response than it returns at once",
            "a newer version of the server; a parser or a proxy may change the parts",
        ),
    )
}
