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
from tasks.drift.fingerprint import Drift, Fingerprint, drift
from tasks.drift.verdict import limit_in, share_checks
from tasks.evaluation import checks
from tasks.evaluation.checks import Agreement
from tasks.evaluation.measuring import located
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


# Compared with the trained model: what all kinds of prompts share.


@dataclass(frozen=True)
class Measured:
    """Results of the engine, compared with the trained model."""

    setup: Setup
    question: Question
    served: Served
    drift: Drift  # distance of its fingerprint from the trained model's
    agreement: Agreement  # comparison of its first greedy tokens with those of transformers
    checks: tuple[Check, ...]
    notes: Mapping[str, Any]  # what the report says about the cause of a failure

    def both(self, *, sampled: bool = False) -> tuple[Responses, Responses]:
        """Return the greedy (or sampled) responses of the model before training and of this one."""
        after, before = self.served.sampled if sampled else self.served.greedy
        return before, after

    def texts(self, *, sampled: bool = False) -> list[list[str]]:
        """Return the same responses as texts."""
        both = zip(reversed(self.question.sides), self.both(sampled=sampled), strict=True)
        return [self.setup.scorer.decode(side.model.path, made.tokens) for side, made in both]


def measure(question: Question, setup: Setup) -> Measured:
    """Serve the model, and compare its fingerprint and first greedy tokens; write `fingerprint.fp`.

    Raises StageProcessError if the engine did not start or crashed.
    """
    reference, settings = Fingerprint.load(question.reference), setup.settings
    model, is_engine = question.served.model, settings.engine != "transformers"
    if not is_engine:
        served = serve_with_transformers(question, setup)
    elif settings.engine == "server":
        from tasks.evaluation.serve_http import serve_over_http

        served = serve_over_http(question, setup)
    else:
        served = serve_with_vllm(question, setup)
    limit = limit_in(setup.profile, reference, model.dtype)
    moved = drift(reference, served.fingerprint, model.dtype)
    appeared_at, in_engine = "", False
    if moved.beyond(limit):
        appeared_at, in_engine = who_moved(question, setup)
    drifted = located(
        checks.drift_check(moved, limit, appeared_at),
        model if in_engine else setup.before,
        model,
        reference.probes,
        setup.explain,
        engine="vllm" if in_engine else "transformers",  # never blamed itself
    )
    own = model.path / FINGERPRINT  # the weights as they are, which the merge has judged
    whole = own if own.is_file() else question.reference
    verdicts = [drifted, *share_checks(whole, served.fingerprint, limit, model.dtype)]
    prompts = question.served.prompts[: len(reference.probes)]
    agreement = Agreement(len(prompts), 0, ())  # of transformers with itself
    if is_engine:
        most = min(checks.GREEDY_TOKENS, settings.max_new_tokens)
        stops = question.served.stops
        expected = setup.scorer.generate(model, prompts, most, stops)
        noise = checks.engine_noise(reference, served.fingerprint)
        tokens = served.greedy[0].tokens[: len(prompts)]
        agreement = checks.compare_greedy(
            tokens, expected.tokens, expected.candidates, noise, model.dtype
        )
        verdicts.append(checks.greedy_check(agreement))
    notes = {
        "drift_appeared_at": appeared_at or None,
        "greedy_differences": list(agreement.differences[:20]),
    }
    return Measured(setup, question, served, moved, agreement, (*verdicts, *served.checks), notes)


def who_moved(question: Question, setup: Setup) -> tuple[str, bool]:
    """Return what changed the model, after a failed drift check, and True if it is the engine."""
    reference = Fingerprint.load(question.reference)
    model = replace(question.served.model, float32=reference.arithmetic == "float32")
    with tempfile.TemporaryDirectory(prefix="plumbline-") as folder:
        seen = setup.scorer.fingerprint(model, question.reference, Path(folder) / "served.fp")
    limit = limit_in(setup.profile, reference, seen.arithmetic)
    if drift(reference, seen, model.dtype).beyond(limit):
        text = "the served folder: transformers sees it moved too, so it changed after convert"
        return text, False
    engine = setup.settings.engine
    return f"serve: transformers finds the folder unmoved, {engine} computes something else", True
