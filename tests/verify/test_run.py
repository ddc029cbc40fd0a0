"""All checks in their order, and the report: its verdict, and its forms for people and programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from tasks.core.report import Cause, Row
from tasks.verify.compare import align, kl_of
from tasks.verify.run import EXIT_STATUS, Report, Target, choose, verify
from tasks.verify.server import ServedModel, ServerError
from tasks.witness.plumbline_witness.prints import FormatNoise
from tests.verify.synthetic import ArrayServer, world
from tests.verify.synthetic import answers as scores

TRAINED = world(seed=4, count=8, moved=0.4)


def server(**models: float) -> ArrayServer:
    """Return a server of adapters with this share of the trained update each, and of the base."""
    shift = TRAINED.trained - TRAINED.base
    logits = {name: TRAINED.base + share * shift for name, share in models.items()}
    return ArrayServer(TRAINED.probes, {"base": TRAINED.base, **logits})


def test_the_trained_model_is_verified_and_the_rest_named() -> None:
    report = verify(server(lora=1.0), Target("lora", "base"), TRAINED.reference(), "standard")
    assert report.outcome == "verified", report.text()
    assert {"template", "tokens"} <= set(report.unproven)
    assert "not proven: template, tokens" in report.line


def test_noise_beside_an_exact_base_is_in_the_adapter() -> None:
    """Rounding would change the base as well."""
    noise = np.random.default_rng(1).normal(0, 0.15, TRAINED.trained.shape)
    known = server()
    known._models["noisy"] = TRAINED.trained + noise
    report = verify(known, Target("noisy", "base"), TRAINED.reference(), "standard")
    assert report.outcome == "fault"
    assert "partly-other-weights" in [cause.code for cause in report.causes]


@pytest.mark.parametrize(
    "error", [ServerError("no answer", code="unreachable"), ZeroDivisionError("by zero")]
)
def test_a_check_that_raises_proves_nothing(error: Exception) -> None:
    class Broken(ArrayServer):
        def score(self, *args: object, **others: object) -> list[object]:  # type: ignore[override]
            raise error

    known = Broken(TRAINED.probes, {"lora": TRAINED.trained})
    report = verify(known, Target("lora", None), TRAINED.reference(), "standard")
    assert report.outcome == "unverified"
    assert all(str(error) in check.text for check in report.checks if check.code == "distribution")


NOISE = 1.5
"""Standard deviation of an engine's error of a logit: far above what this adapter moves."""


def light(share: float, moved: float = 0.5) -> tuple[str, Mapping[str, str], list[str]]:
    """Verify a server with noise, whose adapter's share is `share`: outcome, verdicts, causes."""
    own = world(seed=6, count=24, vocab=400, moved=moved)
    random = np.random.default_rng(2)
    logits = own.base + share * (own.trained - own.base)
    logits = logits + random.normal(0, NOISE, logits.shape)
    made = own.reference()
    kl = float(kl_of(made.trained, align(made.trained, scores(own.probes, logits))).mean())
    noise = FormatNoise(mean_kl=kl, p95_kl=4 * kl, median_kl=kl, top1_agreement=0.7)
    trained = replace(made.trained, formats=dict.fromkeys(("bfloat16", "float32"), noise))
    known = ArrayServer(own.probes, {"merged": logits})
    report = verify(known, Target("merged", None), replace(made, trained=trained), "standard")
    verdicts: dict[str, str] = {check.code: check.verdict for check in report.checks}
    return report.outcome, verdicts, [cause.code for cause in report.causes]


def test_an_adapter_below_the_noise_is_judged_by_its_share() -> None:
    """KL calls both the trained model; the share tells the base."""
    _, verdicts, _ = light(1.0)
    assert (verdicts["distribution"], verdicts["adapter"]) == ("ok", "ok")
    outcome, verdicts, causes = light(0.0)
    assert causes[0] == "base-served"
    assert (outcome, verdicts["distribution"], verdicts["adapter"]) == ("fault", "ok", "fault")
    assert {"adapter-scaled", "rounded-away"} <= set(light(0.3)[2])


def test_probes_without_power_prove_nothing() -> None:
    for share in (0.0, 1.0):
        outcome, verdicts, _ = light(share, moved=0.01)
        assert (outcome, verdicts["adapter"]) == ("unverified", "unknown")


SAME = Row("distribution", "ok", "as trained", {"mean_kl": 2e-5}, limit={"mean_kl": 1e-3})
OTHER = replace(
    SAME, verdict="fault", causes=(Cause("base-served", "the base answers", "vllm serve BASE"),)
)
HIDDEN = Row("prompt", "unknown", "the server does not say")
OK_PROMPT = Row("prompt", "ok", "the same")
UNDECIDED = Row("adapter", "unknown", "base or trained", {"dose": 0.4})


def report(*checks: Row) -> Report:
    about = ("http://host:8000", "vllm 0.32", "lora", "base", "/runs/lora", "step 3", "standard")
    return Report(*about, checks, 1.25)


@pytest.mark.parametrize(
    ("checks", "outcome", "status"),
    [
        ((SAME, OK_PROMPT), "verified", 0),
        ((SAME, HIDDEN), "verified", 0),
        ((OTHER, OK_PROMPT), "fault", 1),
        ((SAME, replace(OK_PROMPT, verdict="fault")), "fault", 1),
        ((replace(SAME, verdict="unknown"), OK_PROMPT), "unverified", 2),
        ((SAME, replace(OK_PROMPT, code="adapter", verdict="unknown")), "verified", 0),
        ((SAME, UNDECIDED), "unverified", 2),
        ((OK_PROMPT,), "unverified", 2),
        ((), "unverified", 2),
    ],
)
def test_nothing_is_verified_without_the_distribution(
    checks: tuple[Row, ...], outcome: str, status: int
) -> None:
    made = report(*checks)
    assert (made.outcome, EXIT_STATUS[made.outcome]) == (outcome, status)


def test_junit_counts_failures_and_skipped() -> None:
    """A program that only counts failures must not take "unverified" for a success."""
    suite = ElementTree.fromstring(report(OTHER, OK_PROMPT, replace(HIDDEN, code="load")).junit())
    assert [suite.get(key) for key in ("tests", "failures", "skipped", "errors")] == list("3110")
    cases = {case.get("name"): case for case in suite}
    assert "-> vllm serve BASE" in (cases["distribution"].findtext("failure") or "")
    assert cases["load"].find("skipped") is not None
    unverified = ElementTree.fromstring(report(HIDDEN).junit())
    assert unverified.get("errors") == "1"
    assert unverified.find("testcase/error") is not None


BASE = ServedModel("base", None, "/models/base")


def chosen(*served: ServedModel, **names: str | None) -> tuple[str, str | None]:
    target = choose(served, Path("/runs/lora"), **{"model": None, "base": None, **names})
    return target.model, target.base


def test_the_model_is_found() -> None:
    lora = ServedModel("mine", "base", "/runs/lora")
    other = ServedModel("other", "base", "/runs/other")
    assert chosen(BASE) == ("base", None)
    assert chosen(BASE, lora, other) == ("mine", "base")
    assert chosen(BASE, lora, other, model="other") == ("other", "base")
    assert chosen(BASE, lora, model="mine", base="mine") == ("mine", "mine")
    assert chosen(BASE, replace(lora, parent="hub/name")) == ("mine", None)
