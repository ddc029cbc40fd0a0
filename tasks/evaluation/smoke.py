"""Serve a model and compare it with the trained one: what all kinds of prompts share."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.core.contract import Check
from tasks.drift.fingerprint import Drift, Fingerprint, drift
from tasks.drift.verdict import limit_in, share_checks
from tasks.evaluation import checks
from tasks.evaluation.checks import Agreement
from tasks.evaluation.measuring import located
from tasks.evaluation.prompts import Question, Setup
from tasks.evaluation.serve import Responses, Served, serve_with_transformers, serve_with_vllm
from tasks.evaluation.serve_http import serve_over_http
from tasks.witness.plumbline_witness.prints import FINGERPRINT


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
