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
from tasks.drift.verdict import FINGERPRINT
from tasks.evaluation.scoring import Generated, ModelRef, Prompts, ReferenceScorer
from tasks.process.output import Log
from tasks.serving.prompts import Chat
from tasks.serving.vllm.job import HEADROOM, Job, VllmChild


@dataclass(frozen=True)
class Question:
    """The models to serve, and their prompts.

    Attributes:
        served: folder of the model under test.
        base: folder of the model before training; None to serve no other model.
        reference: fingerprint file with the probes and their token ids.
        chats: conversations of the prompts, without answers; None for raw texts.
        prompts: the conversations rendered for `served`.
        base_prompts: the conversations rendered for `base`.
        dtype: torch dtype name.
        temperature: temperature of sampled responses; None for greedy responses alone.
        attn_implementation: attention of transformers, by its name.
    """

    served: Path
    base: Path | None
    reference: Path
    chats: Sequence[Chat] | None
    prompts: Prompts
    base_prompts: Prompts
    dtype: str
    temperature: float | None = None
    attn_implementation: str = "sdpa"


@dataclass(frozen=True)
class Responses:
    """Responses of one model to all prompts.

    Attributes:
        tokens: new token ids of each response.
        stopped: True for each response that ended before the token limit.
        seconds: time of generation.
    """

    tokens: list[list[int]]
    stopped: list[bool]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return sum(map(len, self.tokens)) / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Served:
    """Results of an engine.

    Attributes:
        fingerprint: fingerprint of the served model.
        after: greedy responses of the served model.
        before: greedy responses of the base; None without a base.
        rendered_differently: number of conversations that the engine's own tokenizer and chat
            template render to other token ids.
        load_s: seconds to load the folder, without imports.
        sampled_after: sampled responses of the served model; None without a temperature.
        sampled_before: sampled responses of the base; None without a temperature.
        checks: further verdicts of the engine.
    """

    fingerprint: Fingerprint
    after: Responses
    before: Responses | None
    rendered_differently: int
    load_s: float
    sampled_after: Responses | None = None
    sampled_before: Responses | None = None
    checks: tuple[Check, ...] = ()


def serve_with_vllm(
    question: Question, settings: Smoke, *, out: Path, child: VllmChild, log: Log, log_path: Path
) -> Served:
    """Serve the model under test with vLLM in a child process, then the base in another engine.

    Args:
        question: the models and their prompts.
        settings: settings of the engine.
        out: folder that gets `fingerprint.fp`.
        child: runs the engines.
        log: gets the engine's output.
        log_path: file for the engine's whole output.

    Raises:
        StageProcessError: vLLM did not start or crashed.
    """
    served = Job(
        served=str(question.served),
        out="",
        prompts=question.prompts.tokens,
        max_new_tokens=settings.max_new_tokens,
        max_model_len=settings.max_model_len or longest_sequence(question, settings.max_new_tokens),
        reference=str(question.reference),
        chats=None if question.chats is None else list(question.chats),
        dtype=question.dtype,
        tensor_parallel=settings.tensor_parallel,
        temperature=question.temperature,
    )
    jobs = [served]
    if question.base is not None:
        base = replace(
            served,
            served=str(question.base),
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
    """Return the output of a reward model's head at the last token of each text.

    Args: as of `serve_with_vllm`.
    """
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
    attention = question.attn_implementation
    served = ModelRef(question.served, dtype=question.dtype, attn_implementation=attention)
    fingerprint = scorer.fingerprint(served, question.reference, out / FINGERPRINT)
    models = [(served, question.prompts, question.prompts.eos)]
    if question.base is not None:
        base = ModelRef(question.base, dtype=question.dtype, attn_implementation=attention)
        models.append((base, question.base_prompts, ending_ids(question)))
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
    return Served(fingerprint, after, before[0] if before else None, 0, 0.0, first, last)


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
