"""Clean checkpoints have no errors; broken ones have the finding of their fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.audit.check import CHECKS, Severity
from tasks.audit.run import Report, audit
from tasks.core.errors import PlumblineError
from tasks.delivery.examination import examine
from tasks.delivery.plan import Request, Target, prepare
from tasks.delivery.source import given_adapters
from tasks.weights.execute.worker import perform
from tests.audit.corpus import Corpus
from tests.audit.corpus.breaking import as_it_is
from tests.audit.corpus.broken_models import BROKEN_MODELS
from tests.audit.corpus.broken_served import BROKEN_SERVED
from tests.audit.corpus.broken_tuned import BROKEN_TUNED
from tests.audit.corpus.clean import CLEAN

BROKEN = {**BROKEN_MODELS, **BROKEN_TUNED, **BROKEN_SERVED}
NEVER = {
    each.code
    for each in CHECKS
    if each.module.endswith((".config", ".merge")) and each.severity is not Severity.INFO
}
"""Codes that no clean checkpoint may have, not even as a warning."""


def lines(report: Report, *severities: Severity) -> list[str]:
    return [
        f"{finding.code} {finding.where}: {finding.found}; expected {finding.expected}"
        for finding in report.findings
        if finding.severity in severities
    ]


def refused(folder: Path, base: Path | None) -> str:
    """Return why `deliver` refuses the folder from headers; "" if it plans the delivery."""
    try:
        given, adapters = given_adapters(str(folder), [])
        if given.kind == "adapter" and base is None:
            return ""  # nothing to compare with
        examine([folder], None if given.kind == "model" else base)
        target = Target("bfloat16", 10**9)
        prepare(Request(given, base, target, None, None, perform, tuple(adapters)))
    except PlumblineError as error:
        return error.message
    return ""


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in [folder, *folder.rglob("*")]
    }


RARE = (
    "deepseek_v3", "falcon", "gemma2", "gemma3", "gemma3-lora", "gemma3_text", "gpt_neox",
    "merged-experts", "moe-all-linear", "moe-linear", "moe-named", "qwen2_5_vl", "qwen2_moe",
    "vl-lora",
)  # fmt: skip
"""Checkpoints that the default suite leaves to `make test-all`."""
BY_CHILD = ("gpt2", "gpt2-lora", "qwen3_moe")
"""As Mixtral, of which a child process makes the class: six seconds each."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.slow if clean.slow or name in (*RARE, *BY_CHILD) else ()
        )
        for name, clean in CLEAN.items()
    ],
)
def test_a_clean_checkpoint_has_no_error(name: str, corpus: Corpus) -> None:
    folder = corpus.clean(name)
    before = snapshot(folder)
    for base in {None, corpus.base_of(name)}:
        for values in (False, True):
            report = audit(folder, base=base, values=values)
            assert not lines(report, Severity.ERROR)
            assert not {finding.code for finding in report.findings} & NEVER
    assert not refused(folder, corpus.base_of(name))
    adapter = corpus.adapter(CLEAN[name].adapter)
    if adapter is not None:
        report = audit(folder, base=corpus.base_of(name), values=True, adapter=adapter)
        assert not lines(report, Severity.ERROR)
        assert {
            finding.code for finding in report.findings if finding.code.startswith("MERGE_")
        } == {"MERGE_PROVEN"}
    assert snapshot(folder) == before


def faults_of(name: str, corpus: Corpus) -> list[str]:
    """Return what is wrong with the audit of a broken checkpoint."""
    case, wrong = BROKEN[name], []
    folder, adapter = corpus.broken(case), corpus.adapter(case.adapter)
    base = corpus.base_for(case)
    report = audit(folder, base=base, values=case.values, adapter=adapter)
    codes = {finding.code for finding in report.findings}
    if case.code not in codes or "CANNOT_JUDGE" in codes:
        wrong.append(f"{name}: {case.code} is not among {sorted(codes)}")
    known = lines(report, Severity.ERROR) or "ADAPTER_TYPE" in codes  # peft serves other types
    if not known and (reason := refused(folder, base)):
        wrong.append(f"{name}: deliver refuses it without a finding: {reason}")
    if case.how is not as_it_is:  # else the fault lies in the arguments of the audit
        clean = corpus.clean(case.of)
        before = audit(clean, base=base, values=case.values, adapter=adapter)
        if case.code in {finding.code for finding in before.findings}:
            wrong.append(f"{name}: {case.code} without the fault")
    return wrong


@pytest.mark.parametrize("rare", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_broken_checkpoints_have_the_finding_of_their_fault(rare: bool, corpus: Corpus) -> None:
    names = [name for name, case in BROKEN.items() if (case.of in RARE) is rare]
    assert [fault for name in names for fault in faults_of(name, corpus)] == []
