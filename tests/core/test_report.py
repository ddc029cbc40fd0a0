"""One writer: a CI job that reads JUnit sees every failure, whichever command wrote the file."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tasks.audit.run import audit
from tasks.bisect.report import Divergence
from tasks.bisect.report import Report as Bisection
from tasks.core.report import Report
from tasks.release.gate import Gate, Verdict
from tests.audit.making import adapter_tensors, make_adapter

PARTED = [Divergence("model.norm", "output", 1.0, 0.1)]
REPORTS: dict[str, tuple[Report, str]] = {
    "parted": (Bisection("a", "b", "differs", divergences=PARTED), "1100"),
    "below the gate": (Bisection("a", "b", "below", divergences=PARTED), "1000"),
    "the same": (Bisection("a", "b", "same"), "1000"),
    "refused": (Bisection("a", "b", "refused", "other sizes"), "1010"),
    "gate": (Gate((Verdict("loss <= 1", 2.0, 1.0), Verdict("steps > 1", ok=True))), "2100"),
}


def counts(text: str) -> str:
    suite = ElementTree.fromstring(text)
    return "".join(str(suite.get(key)) for key in ("tests", "failures", "errors", "skipped"))


@pytest.mark.parametrize("name", REPORTS)
def test_the_ending_of_the_file_decides(name: str, tmp_path: Path) -> None:
    report, expected = REPORTS[name]
    assert counts(report.form("report.xml")) == expected
    assert report.form("report.md").startswith("```text\n")
    assert report.form("report.json").startswith("{")


def test_errors_of_an_audit_and_of_its_base_are_failures(tmp_path: Path) -> None:
    empty = {key: array[:0, 0] for key, array in adapter_tensors().items()}
    report = audit(make_adapter(tmp_path / "it", empty))
    warnings = len(report.findings) - len(report.errors)
    assert counts(report.form("r.xml")) == f"{len(report.findings)}{len(report.errors)}00"
    assert (len(report.errors), warnings) == (1, 0)
