"""Serve a folder in vLLM or transformers, to measure what it computes.

vLLM is the engine that will serve the model; transformers is the fallback. Both get the same token
ids as prompts, and score the same probes at the same ids.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.config.after_training import Smoke
from tasks.core.contract import Check
from tasks.drift.fingerprint import Fingerprint
from tasks.evaluation.scoring import Generated, ModelRef, Prompts, ReferenceScorer
from tasks.process.output import Log
from tasks.serving.prompts import Chat, question_of
from tasks.serving.vllm.job import HEADROOM, Job, VllmChild
from tasks.witness.plumbline_witness.prints import FINGERPRINT


@dataclass(frozen=True)
class Question:
    """The models to serve, and their prompts."""

    served: ModelRef
    base: ModelRef | None  # the model before training
    reference: Path  # fingerprint file
    prompts: Prompts
    base_prompts: Prompts
    # conversations of the prompts, with the answers that the data has; None for raw texts
    rows: Sequence[Mapping[str, Any]] | None = None
    left_out: int = 0  # held-out rows that were too long, or not suitable
    # that the served tokenizer gives the tokens of training
    checks: tuple[Check, ...] = ()
    temperature: float | None = None  # None for greedy responses alone

    @property
    def chats(self) -> list[Chat] | None:
        """Conversations of the prompts, without answers; None for raw texts."""
        return None if self.rows is None else list(map(question_of, self.rows))


@dataclass(frozen=True)
class Responses:
    """Responses of one model to all prompts."""

    tokens: list[list[int]]
    stopped: list[bool]  # True for each response that ended before the token limit
    seconds: float  # time of generation

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return sum(map(len, self.tokens)) / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Served:
    """Results of an engine."""

    fingerprint: Fingerprint
    after: Responses
    before: Responses | None  # of the base; None without one
    # number of conversations that the engine's own tokenizer and chat template render to other
    # token ids; None if it has none of its own
    rendered_differently: int | None
    load_s: float  # seconds to load the folder, without imports
    sampled_after: Responses | None = None  # None without a temperature
    sampled_before: Responses | None = None  # None without a temperature or a base
    checks: tuple[Check, ...] = ()


def serve_with_vllm(
    question: Question, settings: Smoke, *, out: Path, child: VllmChild, log: Log, log_path: Path
) -> Served:
    """Serve the model under test with vLLM in a child process, then the base in another engine.

    Raises:
        StageProcessError: vLLM did not start or crashed.
    """
    served = Job(
        served=str(question.served.path),
        out="",
        prompts=question.prompts.tokens,
        max_new_tokens=settings.max_new_tokens,
        max_model_len=settings.max_model_len or longest_sequence(question, settings.max_new_tokens),
        reference=str(question.reference),
        chats=question.chats,
        dtype=question.served.dtype,
        tensor_parallel=settings.tensor_parallel,
        temperature=question.temperature,
    )
    jobs = [served]
    if question.base is not None:
        base = replace(
            served,
            served=str(question.base.path),
            prompts=question.base_prompts.tokens,
            stop=ending_ids(question),
            reference=None,
            chats=None,
        )
        jobs.append(base)
    after, *before = _run(jobs, settings, out, child, log, log_path)
    return Served(
        fingerprint=Fingerprint.load(out / FINGERPRINT),
        after=_responses(after["served"]),
        before=_responses(before[0]["served"]) if before else None,
        rendered_differently=after["rendered_differently"],
        load_s=after["load_s"],
        sampled_after=_sampled(after),
        sampled_before=_sampled(before[0]) if before else None,
    )


def score_with_vllm(
    model: ModelRef,
    texts: Sequence[Sequence[int]],
    settings: Smoke,
    *,
    out: Path,
    child: VllmChild,
    log: Log,
    log_path: Path,
) -> list[float]:
    """Return the output of a reward model's head at the last token of each text."""
    job = Job(
        served=str(model.path),
        out="",
        prompts=[list(text) for text in texts],
        max_new_tokens=0,
        max_model_len=settings.max_model_len or max(map(len, texts)) + HEADROOM,
        dtype=model.dtype,
        rewards=True,
    )
    (result,) = _run([job], settings, out, child, log, log_path)
    scores: list[float] = result["rewards"]
    return scores


def _run(
    jobs: Sequence[Job], settings: Smoke, out: Path, child: VllmChild, log: Log, log_path: Path
) -> list[dict[str, Any]]:
    """Run jobs in a temporary folder inside `out`; a fingerprint that one takes goes into `out`."""
    with tempfile.TemporaryDirectory(dir=out, prefix=".vllm-") as work:
        placed = [replace(job, out=f"{work}/{number}") for number, job in enumerate(jobs)]
        results = child.run(placed, settings, log=log, log_path=log_path)
        for job in placed:
            if job.reference is not None:
                (Path(job.out) / FINGERPRINT).rename(out / FINGERPRINT)
    return results


def serve_with_transformers(
    question: Question, settings: Smoke, *, out: Path, scorer: ReferenceScorer
) -> Served:
    """Serve with transformers in the reference child, one sequence at a time."""
    fingerprint = scorer.fingerprint(question.served, question.reference, out / FINGERPRINT)
    models = [(question.served, question.prompts, question.prompts.eos)]
    if question.base is not None:
        models.append((question.base, question.base_prompts, ending_ids(question)))
    tokens = settings.max_new_tokens
    after, *before = (
        _ended(scorer.greedy(model, prompts.tokens, max_new_tokens=tokens, eos=stops), stops)
        for model, prompts, stops in models
    )
    sampled: list[Responses | None] = [None, None]
    if question.temperature is not None:
        sampled = [
            _ended(
                scorer.sample(
                    model,
                    prompts.tokens,
                    max_new_tokens=tokens,
                    temperature=question.temperature,
                    eos=stops,
                ),
                stops,
            )
            for model, prompts, stops in models
        ]
    first, last = sampled[0], sampled[-1] if before else None
    return Served(fingerprint, after, before[0] if before else None, None, 0.0, first, last)


def _ended(generated: Generated, stops: Sequence[int]) -> Responses:
    stopped = [bool(ids) and ids[-1] in set(stops) for ids in generated.tokens]
    return Responses(generated.tokens, stopped, generated.seconds)


def _responses(generated: Mapping[str, Any]) -> Responses:
    stopped = [reason == "stop" for reason in generated["reasons"]]
    return Responses(generated["tokens"], stopped, generated["seconds"])


def _sampled(result: Mapping[str, Any]) -> Responses | None:
    return _responses(result["drawn"]) if "drawn" in result else None


def ending_ids(question: Question) -> list[int]:
    """Return the ids that end a response of the base: its own EOS ids and the trained ones."""
    return sorted({*question.prompts.eos, *question.base_prompts.eos})


def longest_sequence(question: Question, max_new_tokens: int) -> int:
    prompts = (*question.prompts.tokens, *question.base_prompts.tokens)
    probes = Fingerprint.load(question.reference).probes
    longest = max((len(p) + max_new_tokens for p in prompts), default=0)
    return max(longest, *(len(p) + 1 for p in probes)) + HEADROOM
