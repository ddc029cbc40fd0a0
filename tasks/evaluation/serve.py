"""Serving a folder to measure it: one question, two engines that can answer it.

vLLM is what will serve the model; transformers is the native fallback. Both continue the same token
ids greedily and score the same probes at the same ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tasks.drift.fingerprint import Fingerprint
from tasks.drift.verdict import FINGERPRINT
from tasks.evaluation.scoring import Greedy, ModelRef, Prompts, ReferenceScorer
from tasks.evaluation.vllm_jobs import HEADROOM, Engine, run_vllm
from tasks.process.output import Log
from tasks.serving.vllm.job import Job


class Limits(Engine, Protocol):
    """What the engines need to know of the settings."""

    @property
    def max_new_tokens(self) -> int: ...
    @property
    def max_model_len(self) -> int | None: ...
    @property
    def tensor_parallel(self) -> int: ...


@dataclass(frozen=True)
class Question:
    """What to serve and what to ask.

    Attributes:
        served: the model under test; `base`: the one before training.
        reference: fingerprint file that gives probes and ids.
        messages: the conversations behind the prompts, without their answers; None for raw texts.
        prompts, base_prompts: the same conversations rendered for each model.
        dtype: torch dtype name.
        temperature: of answers that are drawn beside the greedy ones; None for none.
    """

    served: Path
    base: Path
    reference: Path
    messages: Sequence[Sequence[Mapping[str, str]]] | None
    prompts: Prompts
    base_prompts: Prompts
    dtype: str
    temperature: float | None = None


@dataclass(frozen=True)
class Continued:
    """Continuations of all prompts: tokens, which ended by themselves, seconds."""

    tokens: list[list[int]]
    stopped: list[bool]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return sum(map(len, self.tokens)) / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Served:
    """What an engine answered.

    Attributes:
        fingerprint: of the served model.
        after, before: continuations by the served model and by the base.
        rendered_differently: conversations that the engine's own tokenizer and chat template turn
            into other token ids.
        load_s: seconds the engine took to load the folder, imports not included.
        drawn_after, drawn_before: the same with draws, where the question has a temperature.
    """

    fingerprint: Fingerprint
    after: Continued
    before: Continued
    rendered_differently: int
    load_s: float
    drawn_after: Continued | None = None
    drawn_before: Continued | None = None


def serve_with_vllm(
    question: Question, limits: Limits, *, out: Path, work: Path, log: Log, log_path: Path
) -> Served:
    """Serve with vLLM in a child process: the model under test, then the base on its own.

    Args:
        question: what to serve and ask.
        limits: settings.
        out: folder that gets `fingerprint.fp`.
        work: folder for jobs and results.
        log: gets the engine's output.
        log_path: file for all of it.

    Raises:
        StageProcessError: vLLM did not come up or broke down.
    """
    served = Job(
        served=str(question.served),
        out=str(work / "served"),
        prompts=question.prompts.tokens,
        max_new_tokens=limits.max_new_tokens,
        max_model_len=limits.max_model_len or _longest(question, limits.max_new_tokens),
        reference=str(question.reference),
        messages=_plain(question.messages),
        dtype=question.dtype,
        tensor_parallel=limits.tensor_parallel,
        temperature=question.temperature,
    )
    base = replace(
        served,
        served=str(question.base),
        out=str(work / "base"),
        prompts=question.base_prompts.tokens,
        stop=_stops(question),
        reference=None,
        messages=None,
    )
    results = run_vllm([served, base], limits, log=log, log_path=log_path)
    (work / "served" / FINGERPRINT).rename(out / FINGERPRINT)
    return Served(
        fingerprint=Fingerprint.load(out / FINGERPRINT),
        after=_continued(results[0]["served"]),
        before=_continued(results[1]["served"]),
        rendered_differently=results[0]["rendered_differently"],
        load_s=results[0]["load_s"],
        drawn_after=_drawn(results[0]),
        drawn_before=_drawn(results[1]),
    )


def serve_with_transformers(
    question: Question, limits: Limits, *, out: Path, scorer: ReferenceScorer
) -> Served:
    """The native fallback: the reference child serves, one sequence at a time."""
    served = ModelRef(question.served, dtype=question.dtype)
    fingerprint = scorer.fingerprint(served, question.reference, out / FINGERPRINT)

    base = ModelRef(question.base, dtype=question.dtype)
    asked = (
        (served, question.prompts, question.prompts.eos),
        (base, question.base_prompts, _stops(question)),
    )
    after, before = (
        _ended(
            scorer.greedy(model, prompts.tokens, max_new_tokens=limits.max_new_tokens, eos=stops),
            stops,
        )
        for model, prompts, stops in asked
    )
    if question.temperature is None:
        return Served(fingerprint, after, before, 0, 0.0)
    drawn = [
        scorer.drawn(
            model,
            prompts.tokens,
            max_new_tokens=limits.max_new_tokens,
            temperature=question.temperature,
            eos=stops,
        )
        for model, prompts, stops in asked
    ]
    ended = [_ended(one, stops) for one, (_, _, stops) in zip(drawn, asked, strict=True)]
    return Served(fingerprint, after, before, 0, 0.0, *ended)


def _plain(
    messages: Sequence[Sequence[Mapping[str, str]]] | None,
) -> list[list[dict[str, str]]] | None:
    return None if messages is None else [[dict(m) for m in one] for one in messages]


def _ended(found: Greedy, stops: Sequence[int]) -> Continued:
    stopped = [bool(one) and one[-1] in set(stops) for one in found.tokens]
    return Continued(found.tokens, stopped, found.seconds)


def _continued(answered: Mapping[str, Any]) -> Continued:
    stopped = [reason == "stop" for reason in answered["reasons"]]
    return Continued(answered["tokens"], stopped, answered["seconds"])


def _drawn(result: Mapping[str, Any]) -> Continued | None:
    return _continued(result["drawn"]) if "drawn" in result else None


def _stops(question: Question) -> list[int]:
    """Ids that end the base's answers: its own and the trained ones, to be fair to it."""
    return sorted({*question.prompts.eos, *question.base_prompts.eos})


def _longest(question: Question, max_new_tokens: int) -> int:
    prompts = (*question.prompts.tokens, *question.base_prompts.tokens)
    probes = Fingerprint.load(question.reference).probes
    longest = max((len(p) + max_new_tokens for p in prompts), default=0)
    return max(longest, *(len(p) + 1 for p in probes)) + HEADROOM
