"""The report: its verdict, and its forms for people and programs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

from tasks.core.errors import PlumblineError
from tasks.core.report import Cause, Row
from tasks.verify.run import EXIT_STATUS, Report, attempt, choose
from tasks.verify.servers.server import ServedModel

SAME = Row("distribution", "ok", "as trained", {"mean_kl": 2e-5}, limit={"mean_kl": 1e-3})
OTHER = replace(
    SAME, verdict="fault", causes=(Cause("base-served", "the base answers", "vllm serve BASE"),)
)
HIDDEN = Row("prompt", "unknown", "the server does not say")
OK_PROMPT = Row("prompt", "ok", "the same")


def report(*checks: Row) -> Report:
    return Report(
        "http://host:8000", "vllm 0.32", "lora", "base", "/runs/lora", "step 3", "standard", checks,
        1.25,
    )  # fmt: skip


UNDECIDED = Row("adapter", "unknown", "base or trained", {"dose": 0.4})


OUTCOMES: list[tuple[tuple[Row, ...], str]] = [
    ((SAME, OK_PROMPT), "verified"),
    ((SAME, HIDDEN), "verified"),
    ((OTHER, OK_PROMPT), "fault"),
    ((SAME, replace(OK_PROMPT, verdict="fault")), "fault"),
    ((replace(SAME, verdict="unknown"), OK_PROMPT), "unverified"),
    ((SAME, replace(OK_PROMPT, code="adapter", verdict="unknown")), "verified"),
    ((SAME, UNDECIDED), "unverified"),
    ((OK_PROMPT,), "unverified"),
    ((), "unverified"),
]


def test_nothing_is_verified_without_the_distribution() -> None:
    statuses = {"verified": 0, "fault": 1, "unverified": 2}
    for checks, outcome in OUTCOMES:
        made = report(*checks)
        assert (made.outcome, EXIT_STATUS[made.outcome]) == (outcome, statuses[outcome])


def test_junit_counts_failures_and_skipped() -> None:
    suite = ElementTree.fromstring(report(OTHER, OK_PROMPT, replace(HIDDEN, code="load")).junit())
    assert [suite.get(key) for key in ("tests", "failures", "skipped", "errors")] == list("3110")
    cases = {case.get("name"): case for case in suite}
    failure = cases["distribution"].find("failure")
    assert failure is not None
    assert failure.get("type") == "base-served"
    assert "-> vllm serve BASE" in (failure.text or "")
    assert cases["load"].find("skipped") is not None
    # A program that only counts failures must not take "unverified" for a success.
    unverified = ElementTree.fromstring(report(HIDDEN).junit())
    assert unverified.get("errors") == "1"
    assert unverified.find("testcase/error") is not None


def test_a_check_that_raises_has_proven_nothing() -> None:
    def breaks() -> Row:
        raise ZeroDivisionError("division by zero")

    def refused() -> Row:
        raise PlumblineError("the server refuses", hint="a key")

    broken, goes_on = attempt("load", breaks)
    assert (broken.verdict, goes_on) == ("unknown", "")
    assert "ZeroDivisionError: division by zero" in broken.text
    kept, goes_on = attempt("load", refused)
    assert (kept.verdict, kept.text) == ("unknown", "the server refuses; a key")
    assert goes_on == ""


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
