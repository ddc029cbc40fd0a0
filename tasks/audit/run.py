"""Audit a checkpoint folder.

    report = audit(Path("ckpt"), base=Path("qwen2.5-7b"))
    report.ok                   True if no finding is an error
    print(report.text())

Nothing is written into the folder, nothing in it is run, nothing is unpickled.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.audit.check import Finding, Severity, errors_of, examine, printable
from tasks.audit.source import Source, commands, open_source
from tasks.core import report
from tasks.core.report import Page, Row
from tasks.core.terminal import command

_UNREADABLE = ("FILE_MISSING", "INDEX_WRONG")
"""Errors of a base that cannot be compared with anything."""


@dataclass(frozen=True)
class Report(report.Report):
    """The result of an audit."""

    command = "audit"
    source: str  # path of the folder, as the user wrote it
    kind: str  # for programs; see `tasks.audit.source.Kind`
    what: str  # for people
    findings: tuple[Finding, ...]  # the worst first
    seconds: float
    mendable: bool = False  # `fix=true` writes a copy without errors
    values: bool = True  # the data of all tensors was read, too
    base: str = ""  # folder of the base that it was compared with
    of_base: Report | None = None  # audit of that base as a folder of its own

    @property
    def ok(self) -> bool:
        """True if no finding is an error, neither here nor in the base."""
        return not self.errors and (self.of_base is None or self.of_base.ok)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that are errors."""
        return tuple(errors_of(self.findings))

    def as_json(self) -> dict[str, Any]:
        """Return a dict of plain JSON values."""
        return {
            "source": self.source,
            "kind": self.kind,
            "what": self.what,
            "ok": self.ok,
            "mendable": self.mendable,
            "findings": [finding.as_json() for finding in self.findings],
            "seconds": round(self.seconds, 3),
            **({"base": self.of_base.as_json()} if self.of_base is not None else {}),
        }

    def page(self) -> Page:
        """Return the findings, the worst first, then the errors of the base."""
        rows, explained = list[Row](), set[tuple[str, str]]()
        base = self.of_base if self.of_base is not None and self.of_base.errors else None
        for finding in (*self.findings, *(base.errors if base else ())):
            names = ["found", "expected", "why", "fix"]
            if (finding.code, finding.why) in explained:  # most findings of a code have one reason
                names.remove("why")
            explained.add((finding.code, finding.why))
            details = [f"{name + ':':<10}{getattr(finding, name)}" for name in names]
            where = finding.where if len(rows) < len(self.findings) else f"base: {finding.where}"
            rows.append(Row(finding.code, finding.severity.value, where, details=details))
        unread = "" if self.values else "; headers only, values=true reads the weights, too"
        line = f"{self.counts} in {self.seconds:.1f} s{unread}"
        tail = [f"a copy without the errors: {self.mending}"] if self.mendable else []
        tail += [f"the base has errors: {base.typed}"] if base else []
        head = [f"{self.source}: {self.what}"]
        return Page(head, rows, line, tail, subject=self.source, seconds=self.seconds)

    @property
    def typed(self) -> str:
        """The command that prints this report."""
        return command("audit", source=self.source, values=True if self.values else None)

    @property
    def mending(self) -> str:
        """The command that writes a copy without errors; "" if there is none."""
        return commands(self.source, self.base or None)["repair"] if self.mendable else ""

    @property
    def counts(self) -> str:
        """Counts by severity: `2 errors, 1 warning, 0 infos`."""
        counts = Counter(finding.severity for finding in self.findings)
        parts = [f"{counts[kind]} {kind.value}{'s' * (counts[kind] != 1)}" for kind in Severity]
        return ", ".join(parts)


def audit(
    source: Path,
    *,
    base: Path | None = None,  # trained on or made from; None: the local one that an adapter names
    values: bool | None = None,  # True reads tensor data; None up to 2 GB, and all with `adapter`
    adapter: Path | None = None,  # merged into `base`: every tensor is compared with both
) -> Report:
    """Examine a folder, and its base as if it were one; a broken base is not compared.

    Raises ArtifactError if `source` or `base` is not a folder, or cannot be listed.
    """
    began = time.perf_counter()
    if values is None and adapter is not None:
        values = True
    opened, of_base = open_source(source, base, values=values, adapter=adapter), None
    if opened.base is not None and not opened.base.is_adapter:
        of_base = audit(opened.base.root, values=values)
        if any(finding.code in _UNREADABLE for finding in of_base.errors):
            opened.base = None  # its gaps would be reported as the source's
        opened.planned = of_base.ok
    report = audit_opened(opened)
    seconds = time.perf_counter() - began
    return replace(report, source=str(source), seconds=seconds, of_base=of_base)


def audit_opened(opened: Source) -> Report:
    """Examine an opened folder; its base is only compared with."""
    began = time.perf_counter()
    findings = tuple(examine(opened))
    errors = errors_of(findings)
    is_known = opened.is_model or opened.is_adapter
    mendable = bool(errors) and is_known and all(each.repairable for each in errors)
    return Report(
        str(opened.root),
        opened.kind.value,
        printable(opened.what),
        findings,
        time.perf_counter() - began,
        mendable,
        opened.is_read or not opened.tensors,
        "" if opened.base is None else str(opened.base.root),
    )
