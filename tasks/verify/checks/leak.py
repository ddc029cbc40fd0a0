"""Check that models of one server are not mixed up under load: base, adapter, other adapters.

Each is scored alone first. Then requests for all of them are sent by turns, 1, 8 and 32 at a time:
each has to answer as it did alone (the LoRA leak: vLLM issues 42008 and 49063).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tasks.drift.fingerprint import DriftLimit
from tasks.verify.answers import Answers
from tasks.verify.check import Cause, Check
from tasks.verify.checks.changes import changes, exceeds, few, parted, together
from tasks.verify.servers.scoring import score_next
from tasks.verify.servers.server import Generated, Scores, Server

CROWDS = (1, 8, 32)
"""Requests at the same time."""
_SEQUENCES, _OTHERS = 4, 2
_TOKENS = 8


def leak(answers: Answers, model: str, base: str | None) -> Check:
    """Ask base and adapters by turns, and compare with what each answered alone."""
    server, limit = answers.server, answers.limit
    served = server.models()
    bases = [entry.name for entry in served if entry.parent is None]
    parent = next((entry.parent for entry in served if entry.name == model), None) or base
    others = [entry.name for entry in served if entry.name not in (model, parent)]
    names = [name for name in (parent, model, *others[:_OTHERS]) if name is not None]
    names = list(dict.fromkeys(names))
    if len(names) < 2:
        return Check("leak", "unknown", "the server has no second model to mix it up with")
    sequences = few(answers.reference, _SEQUENCES if server.abilities.prompt_logprobs else 1)
    alone = {name: server.score(name, sequences, workers=1) for name in names}
    apart = max(_mean(changes(alone[names[0]], alone[name])) for name in names[1:])
    measured: dict[str, float | str] = {"models": len(names), "apart": apart}
    if apart <= limit.mean_kl:
        reason = f"models of this server answer alike ({apart:.1e} nats): a leak is invisible"
        return Check("leak", "unknown", reason, measured)
    for crowd in CROWDS:
        mixed = _interleaved(server, names, sequences, crowd)
        for name in names:
            moved = changes(alone[name], mixed[name])
            key = f"kl_{crowd}"
            measured[key] = max(float(measured.get(key, 0.0)), _mean(moved))
            if exceeds(moved, limit):
                cause = _cause(name in bases, server)
                return _fault(name, names, alone, mixed[name], crowd, measured, limit, cause)
    limits = {f"kl_{crowd}": limit.mean_kl for crowd in CROWDS}
    other = _decoded(server, names, sequences)
    if other is not None:
        text = f"{other} generates other tokens beside requests for {_rest(other, names)}"
        return Check("leak", "fault", text, measured, limits, (_cause(other in bases, server),))
    worst = max(float(measured[key]) for key in limits)
    text = f"{', '.join(names)} by turns, up to {max(CROWDS)} at a time: {worst:.1e} nats apart"
    return Check("leak", "ok", text, measured, limits)


def _interleaved(
    server: Server, names: Sequence[str], sequences: Sequence[Sequence[int]], crowd: int
) -> dict[str, list[Scores]]:
    """Score all sequences with all models by turns; return the last answer of each."""
    jobs = [(name, at) for at in range(len(sequences)) for name in names]
    jobs = jobs * -(-crowd // len(jobs))

    def score(job: tuple[str, int]) -> Scores:
        sequence = [sequences[job[1]]]
        if server.abilities.prompt_logprobs:
            return server.score(job[0], sequence, workers=1)[0]
        # These may use a prompt cache, as the requests of users do.
        return score_next(partial(server.next_tokens, job[0], workers=1), sequence)[0]

    scored = together(score, jobs, crowd)
    by_job = dict(zip(jobs, scored, strict=True))
    return {name: [by_job[name, at] for at in range(len(sequences))] for name in names}


def _fault(
    name: str,
    names: Sequence[str],
    alone: dict[str, list[Scores]],
    mixed: list[Scores],
    crowd: int,
    measured: dict[str, float | str],
    limit: DriftLimit,
    cause: Cause,
) -> Check:
    nearest = min(names, key=lambda other: _mean(changes(alone[other], mixed)))
    like = f", nearest to {nearest}" if nearest != name else ""
    beside = f"{crowd} at a time" if crowd > 1 else "by turns"
    text = (
        f"{name} answers {float(measured[f'kl_{crowd}']):.2e} nats apart from itself beside "
        f"requests for {_rest(name, names)}, {beside}{like}"
    )
    limits = {f"kl_{crowd}": limit.mean_kl}
    return Check("leak", "fault", text, measured, limits, (cause,))


def _decoded(
    server: Server, names: Sequence[str], sequences: Sequence[Sequence[int]]
) -> str | None:
    """Return a model whose greedy response changes beside the others; None if there is none."""
    prompt = sequences[0][: max(1, len(sequences[0]) // 2)]

    def respond(name: str) -> Generated:
        return server.generate(name, prompt, _TOKENS, temperature=0)[0]

    alone = {name: respond(name) for name in names}
    jobs = [name for _ in range(4) for name in names]
    crowd = together(respond, jobs, len(jobs))
    for name, made in zip(jobs, crowd, strict=True):
        if parted(server, name, prompt, alone[name], made):
            return name
    return None


def _rest(name: str, names: Sequence[str]) -> str:
    return ", ".join(other for other in names if other != name)


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if values.size else 0.0


def _cause(is_base: bool, server: Server) -> Cause:
    if is_base:
        code, text = "lora-leak", "an adapter leaks into requests for the base"
        hint = (
            "serve the base by a server of its own (vLLM issues 42008 and 49063); vLLM 0.32 on a "
            "CPU keeps apart with --max-loras <one more than adapters>"
        )
    else:
        code = "adapters-mixed"
        text = "requests for one adapter are answered by another one or by the base"
        hint = "vllm serve --max-loras <number of adapters>, or one server per adapter"
    if server.kind == "llama.cpp":
        hint = (
            "llama-server --no-cache-prompt, or cache_prompt=false with every request: its prompt "
            "cache mixes adapters (llama.cpp issue 26207)"
        )
    return Cause(code, text, hint)
