"""Audit: what is wrong with a checkpoint that is lying in a folder, whoever made it.

    report = audit(Path("ckpt"), base=Path("qwen2.5-7b"))
    report.ok                   whether nothing is an error
    print(report.text())

Nothing is written into the folder, nothing in it is run, nothing is unpickled.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten, wrap
from typing import Any

from tasks.audit.examine import examine
from tasks.audit.finding import Finding, Severity, printable
from tasks.audit.repair import would_mend
from tasks.audit.source import Source, open_source

_WIDTH, _INDENT = 110, 20
_CELL = 70
"""Characters of a cell in a table that a page shows."""


@dataclass(frozen=True)
class Report:
    """What an audit found.

    Attributes:
        source: the folder, as it was given.
        kind: what it is, for programs; see `tasks.audit.recognise.Kind`.
        what: what it is, for a person.
        findings: the worst first.
        seconds: wall time.
        mendable: whether `fix=true` writes a copy without its errors.
    """

    source: str
    kind: str
    what: str
    findings: tuple[Finding, ...]
    seconds: float
    mendable: bool = False

    @property
    def ok(self) -> bool:
        """Whether there is no error among the findings."""
        return not any(one.severity is Severity.ERROR for one in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "source": self.source,
            "kind": self.kind,
            "what": self.what,
            "ok": self.ok,
            "mendable": self.mendable,
            "findings": [one.as_json() for one in self.findings],
            "seconds": round(self.seconds, 3),
        }

    def text(self) -> str:
        """For a person: what it is, a table of the findings, each one explained once, a sum."""
        end = [f"\n{self.counts} in {self.seconds:.1f} s"]
        if self.mendable:
            end.append(f"a copy without the errors: {self.mending}")
        return "\n".join([f"{self.source}: {self.what}", *_table(self.findings), *end])

    @property
    def mending(self) -> str:
        """The command that writes a copy without the errors; "" where none would."""
        command = f"python flows/audit.py source={self.source} fix=true out_dir=<a new folder>"
        return command if self.mendable else ""

    def markdown(self) -> str:
        """For the pages of orchestrators and trackers: a table, and below it what to do.

        Their tables do not wrap: what is long stands in the lines below.
        """
        lines = [f"{_code(self.source)}: {_code(self.what)}", "", self.counts]
        if self.findings:
            lines += ["", "| severity | code | found | where |", "|---|---|---|---|"]
        for one in self.findings:
            lines.append(
                f"| {one.severity} | {one.code} | {_cell(one.found)} | {_cell(one.where)} |"
            )
        for one in self.findings:
            lines += ["", f"{one.code}: {_code(one.where)}", f"- expected: {_code(one.expected)}"]
            lines += [f"- why: {_code(one.why)}"] if one.why else []
            lines += [f"- fix: {_code(one.fix)}"]
        return "\n".join(lines) + "\n"

    @property
    def counts(self) -> str:
        """`2 errors, 1 warning, 0 infos`."""
        counts = Counter(one.severity for one in self.findings)
        told = [f"{counts[one]} {one.value}{'s' * (counts[one] != 1)}" for one in Severity]
        return ", ".join(told)


def audit(
    source: Path,
    *,
    base: Path | None = None,
    values: bool = False,
    adapter: Path | None = None,
) -> Report:
    """Examine a folder.

    Args:
        source: the folder.
        base: folder of the model that it was trained on or made from; None takes the one that an
            adapter names, where that is a folder here.
        values: read tensor data too, not headers and documents alone.
        adapter: folder of the adapter that was merged into `base` to make it: with `values` every
            tensor is held against base and adapter.

    Raises:
        ArtifactError: `source` or `base` is no folder, or cannot be listed.
    """
    began = time.perf_counter()
    opened = open_source(source, base, values=values, adapter=adapter)
    found = examine(opened)
    mendable = would_mend(opened, found)
    findings = tuple(_with_paths(one, source, opened) for one in found)
    seconds = time.perf_counter() - began
    what = opened.recognised.what
    return Report(str(source), opened.kind.value, what, findings, seconds, mendable)


def _with_paths(finding: Finding, source: Path, opened: Source) -> Finding:
    """Its commands with the folders of this audit in them."""
    fix = finding.fix.replace("source=DIR", f"source={source}")
    if opened.base is not None:
        fix = fix.replace("base=<the base>", f"base={opened.base.folder.root}")
    if opened.adapter is not None:
        fix = fix.replace("<the adapter>", str(opened.adapter))
    return replace(finding, fix=fix)


def _code(text: str) -> str:
    """Words that a stranger may have chosen, as code: a page shows them, and renders nothing."""
    return f"`{printable(text).replace('`', chr(39))}`"


def _cell(text: str) -> str:
    """The beginning of `text`, for a table."""
    return _code(shorten(text, _CELL, placeholder=" ...")).replace("|", "\\|")


def _table(findings: tuple[Finding, ...]) -> Iterator[str]:
    if not findings:
        return
    code = max(len(one.code) for one in findings)
    yield f"\n{'severity':<9} {'code':<{code}}  where"
    yield "-" * _WIDTH
    told: set[str] = set()
    for one in findings:
        yield f"{one.severity.value:<9} {one.code:<{code}}  {one.where}"
        lines = {"found": one.found, "expected": one.expected, "why": one.why, "fix": one.fix}
        if one.code in told:  # the reason is the same for all of a code
            del lines["why"]
        for name, text in lines.items():
            yield from _wrapped(name, text)
        told.add(one.code)


def _wrapped(name: str, text: str) -> Iterator[str]:
    """A labelled text in lines of bounded width; commands and paths are never broken."""
    lines = wrap(text, _WIDTH - _INDENT, break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(lines):
        label = name if number == 0 else ""
        yield f"{'':<9} {label:<9} {line}"
