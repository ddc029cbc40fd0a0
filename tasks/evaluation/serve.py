"""Serve a folder in vLLM or transformers, to measure what it computes.

vLLM is the engine that will serve the model; transformers is the fallback. Both get the same token
ids as prompts, and score the same probes at the same ids.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tasks.config.sections import Smoke
from tasks.core.contract import Check
from tasks.drift.fingerprint import Fingerprint
from tasks.evaluation.prompts import Question, Setup
from tasks.evaluation.scoring import Generated, ModelRef
from tasks.serving.vllm.job import HEADROOM, Job
from tasks.witness.plumbline_witness.prints import FINGERPRINT


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
    """Results of an engine; responses are those of `Question.sides`."""

    fingerprint: Fingerprint
    greedy: list[Responses] = field(default_factory=list)
    sampled: list[Responses] = field(default_factory=list)  # empty without a temperature
    # number of conversations that the engine's own tokenizer and chat template render to other
    # token ids; None if it has none of its own
    rendered_differently: int | None = None
    load_s: float = 0.0  # seconds to load the folder, without imports
    checks: tuple[Check, ...] = ()


def serve_with_vllm(question: Question, setup: Setup) -> Served:
    """Serve the model under test with vLLM in a child process, then the base in another engine.

    Raises StageProcessError if vLLM did not start or crashed.
    """
    settings = setup.settings
    shared: dict[str, Any] = {
        "out": "",
        "max_new_tokens": settings.max_new_tokens,
        "max_model_len": length_of(question, settings),
        "dtype": question.served.model.dtype,
        "tensor_parallel": settings.tensor_parallel,
        "temperature": question.temperature,
    }
    jobs = [
        Job(
            served=str(question.served.model.path),
            prompts=question.served.prompts,
            reference=str(question.reference),
            chats=question.chats,
            **shared,
        )
    ]
    if (base := question.base) is not None:
        jobs.append(Job(str(base.model.path), prompts=base.prompts, stop=base.stops, **shared))
    results = _run(jobs, setup)
    return Served(
        Fingerprint.load(setup.out / FINGERPRINT),
        [_responses(result["served"]) for result in results],
        [_responses(result["drawn"]) for result in results if "drawn" in result],
        rendered_differently=results[0]["rendered_differently"],
        load_s=results[0]["load_s"],
    )


def score_with_vllm(model: ModelRef, texts: Sequence[Sequence[int]], setup: Setup) -> list[float]:
    """Return the output of a reward model's head at the last token of each text."""
    job = Job(
        served=str(model.path),
        out="",
        prompts=[list(text) for text in texts],
        max_new_tokens=0,
        max_model_len=setup.settings.max_model_len or max(map(len, texts)) + HEADROOM,
        dtype=model.dtype,
        rewards=True,
    )
    (result,) = _run([job], setup)
    scores: list[float] = result["rewards"]
    return scores


def _run(jobs: Sequence[Job], setup: Setup) -> list[dict[str, Any]]:
    """Run jobs in a temporary folder inside `out`; a fingerprint that one takes goes into `out`."""
    with tempfile.TemporaryDirectory(dir=setup.out, prefix=".vllm-") as work:
        placed = [replace(job, out=f"{work}/{number}") for number, job in enumerate(jobs)]
        results = setup.vllm.run(placed, setup.settings, **setup.logs)
        for job in placed:
            if job.reference is not None:
                (Path(job.out) / FINGERPRINT).rename(setup.out / FINGERPRINT)
    return results


def _responses(generated: Mapping[str, Any]) -> Responses:
    stopped = [reason == "stop" for reason in generated["reasons"]]
    return Responses(generated["tokens"], stopped, generated["seconds"])


def serve_with_transformers(question: Question, setup: Setup) -> Served:
    """Serve with transformers in the reference child, one sequence at a time."""
    scorer, path = setup.scorer, setup.out / FINGERPRINT
    served = Served(scorer.fingerprint(question.served.model, question.reference, path))
    for side in question.sides:
        what = side.model, side.prompts, setup.settings.max_new_tokens, side.stops
        served.greedy.append(_ended(scorer.generate(*what), side.stops))
        if question.temperature is not None:
            made = scorer.generate(*what, question.temperature)
            served.sampled.append(_ended(made, side.stops))
    return served


def _ended(generated: Generated, stops: Sequence[int]) -> Responses:
    stopped = [bool(ids) and ids[-1] in set(stops) for ids in generated.tokens]
    return Responses(generated.tokens, stopped, generated.seconds)


def length_of(question: Question, settings: Smoke) -> int:
    """Return the maximum number of tokens that an engine needs for all prompts and probes."""
    prompts = [prompt for side in question.sides for prompt in side.prompts]
    lengths = [len(prompt) + settings.max_new_tokens for prompt in prompts]
    lengths += [len(probe) + 1 for probe in Fingerprint.load(question.reference).probes]
    return settings.max_model_len or max(lengths) + HEADROOM
