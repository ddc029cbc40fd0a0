"""The report: its verdict, and its forms for people and programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tasks.core.errors import ConfigError, PlumblineError
from tasks.verify.check import Cause, Check
from tasks.verify.report import EXIT_STATUS, WIDTH, Report
from tasks.verify.run import attempt, choose
from tasks.verify.servers.server import ServedModel

SAME = Check("distribution", "ok", "as trained", {"mean_kl": 2e-5}, {"mean_kl": 1e-3})
OTHER = Check(
    "distribution",
    "fault",
    "another distribution " + "that is described at length " * 8,
    {"mean_kl": 0.25, "worst": "chat 2"},
    {"mean_kl": 1e-3},
    (Cause("base-served", "the base answers", "vllm serve BASE --lora-modules NAME=DIR"),),
)
DOSE = Check("adapter", "fault", "dose 0", causes=(Cause("base-served", "dose 0", "look"),))
HIDDEN = Check("prompt", "unknown", "the server does not say")
OK_PROMPT = Check("prompt", "ok", "the same")


def report(*checks: Check) -> Report:
    return Report(
        "http://host:8000", "vllm 0.32", "lora", "base", "/runs/lora", "step 3", "standard", checks,
        1.25,
    )  # fmt: skip


UNDECIDED = Check("adapter", "unknown", "base or trained", {"dose": 0.4})


OUTCOMES: list[tuple[tuple[Check, ...], str]] = [
    ((SAME, OK_PROMPT), "verified"),
    ((SAME, HIDDEN), "verified"),
    ((OTHER, OK_PROMPT), "fault"),
    ((SAME, replace(OK_PROMPT, verdict="fault")), "fault"),
    ((replace(SAME, verdict="unknown"), OK_PROMPT), "unverified"),
    ((SAME, replace(OK_PROMPT, name="adapter", verdict="unknown")), "verified"),
    ((SAME, UNDECIDED), "unverified"),
    ((OK_PROMPT,), "unverified"),
    ((), "unverified"),
]


def test_nothing_is_verified_without_the_distribution() -> None:
    statuses = {"verified": 0, "fault": 1, "unverified": 2}
    for checks, outcome in OUTCOMES:
        made = report(*checks)
        assert (made.outcome, EXIT_STATUS[made.outcome]) == (outcome, statuses[outcome])


def test_the_table_has_at_most_100_columns() -> None:
    text = report(OTHER, HIDDEN).text()
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "mean kl: 0.25 (limit 0.001)" in text
    assert "[base-served]" in text
    assert "-> vllm serve BASE" in text
    # A cause is explained once; faults come first.
    text = report(OK_PROMPT, OTHER, replace(OTHER, name="adapter")).text()
    assert text.count("-> vllm serve BASE") == 1
    assert "cause: as above [base-served]" in text
    order = [text.index(f"\n{name}") for name in ("distribution", "adapter", "prompt")]
    assert order == sorted(order)
    # What a server says may hold sequences for a terminal.
    assert "\x1b" not in report(replace(HIDDEN, text="\x1b[2Jgone")).text()


def test_json_has_everything() -> None:
    document = json.loads(json.dumps(report(OTHER, DOSE, HIDDEN).as_json()))
    assert (document["verdict"], document["causes"]) == ("fault", ["base-served"])
    assert document["unproven"] == ["prompt"]
    assert document["checks"][0]["measured"]["mean_kl"] == 0.25
    assert document["checks"][0]["causes"][0]["hint"].startswith("vllm serve")


def test_junit_counts_failures_and_skipped() -> None:
    suite = ElementTree.fromstring(report(OTHER, OK_PROMPT, replace(HIDDEN, name="load")).junit())
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
    def breaks() -> Check:
        raise ZeroDivisionError("division by zero")

    def refused() -> Check:
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


def test_names_are_refused_with_those_of_the_server() -> None:
    def refusal(call: Callable[[], object]) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            call()
        return list(caught.value.details)

    other = ServedModel("other", "base", "/runs/other")
    (several,) = refusal(lambda: chosen(BASE, other))
    assert "base, other -> name=" in several
    wrong = refusal(lambda: chosen(BASE, other, model="mine", base="bse"))
    assert [line.partition(":")[0] for line in wrong] == ["name=mine", "base=bse"]
    assert all("it has base, other" in line for line in wrong)
    (none,) = refusal(lambda: chosen())
    assert "name=" in none
