"""Audit a checkpoint folder.

    report = audit(Path("ckpt"), base=Path("qwen2.5-7b"))
    report.ok                   True if no finding is an error
    print(report.text())

Nothing is written into the folder, nothing in it is run, nothing is unpickled.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.audit.check import Finding, Severity, errors_of, examine, printable
from tasks.audit.source import command, commands, open_source
from tasks.core.terminal import plain

_UNREADABLE = ("FILE_MISSING", "INDEX_WRONG")
"""Errors of a base that cannot be compared with anything."""


@dataclass(frozen=True)
class Report:
    """The result of an audit.

    Attributes:
        source: path of the folder, as the user wrote it.
        kind: kind of the folder, for programs; see `tasks.audit.source.Kind`.
        what: description of the folder, for people.
        findings: all findings, the worst first.
        seconds: wall time.
        mendable: True if `fix=true` writes a copy without errors.
        values: True if the data of all tensors was read, too.
        base: folder of the base that it was compared with; "" for none.
        of_base: audit of that base as a folder of its own; None without a base.
    """

    source: str
    kind: str
    what: str
    findings: tuple[Finding, ...]
    seconds: float
    mendable: bool = False
    values: bool = True
    base: str = ""
    of_base: Report | None = None

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

    def text(self) -> str:
        """Return the report for a terminal: kind, findings with explanations, counts."""
        unread = "" if self.values else "; headers only, values=true reads the weights, too"
        lines = [f"{self.source}: {self.what}", *_lines(self.findings)]
        lines += ["", f"{self.counts} in {self.seconds:.1f} s{unread}"]
        if self.mendable:
            lines.append(f"a copy without the errors: {self.mending}")
        if self.of_base is not None and self.of_base.errors:
            lines += ["", f"{self.of_base.source}: the base, not the {self.kind}:"]
            lines += [*_lines(self.of_base.errors), "", self.of_base.command]
        return plain("\n".join(lines))

    @property
    def command(self) -> str:
        """The command that prints this report."""
        return command("audit", source=self.source, values=True if self.values else None)

    @property
    def mending(self) -> str:
        """The command that writes a copy without errors; "" if there is none."""
        return commands(self.source, self.base or None)["repair"] if self.mendable else ""

    def markdown(self) -> str:
        """Return the text for pages of orchestrators and trackers, which do not render it."""
        return "```text\n" + self.text().replace("`", "'") + "\n```\n"

    @property
    def counts(self) -> str:
        """Counts by severity: `2 errors, 1 warning, 0 infos`."""
        counts = Counter(finding.severity for finding in self.findings)
        parts = [f"{counts[kind]} {kind.value}{'s' * (counts[kind] != 1)}" for kind in Severity]
        return ", ".join(parts)


def audit(
    source: Path,
    *,
    base: Path | None = None,
    values: bool | None = None,
    adapter: Path | None = None,
    alone: bool = False,
) -> Report:
    """Examine a folder, and its base as if it were one; a broken base is not compared.

    Args:
        base: folder of the model that it was trained on or made from; None uses the base that an
            adapter names, if that is a local folder or in the hub cache.
        values: True to read all tensor data, False for headers and JSON files only; None reads
            weights up to 2 GB, and all with `adapter`.
        adapter: folder of the adapter that was merged into `base`: every tensor is compared with
            base and adapter, if values are read.
        alone: neither audit the base, nor plan the merge into it, nor compare the ids of a
            tokenizer that transformers builds anew: `deliver` does all three itself.

    Raises:
        ArtifactError: `source` or `base` is not a folder, or cannot be listed.
    """
    began = time.perf_counter()
    if values is None and adapter is not None:
        values = True
    opened, of_base = open_source(source, base, values=values, adapter=adapter), None
    if opened.base is not None and not opened.base.is_adapter and not alone:
        of_base = audit(opened.base.folder.root, values=values)
        if any(finding.code in _UNREADABLE for finding in of_base.errors):
            opened.base = None  # its gaps would be reported as the source's
        opened.planned = of_base.ok
    opened.alone = alone
    findings = tuple(examine(opened))
    errors = errors_of(findings)
    is_known = opened.is_model or opened.is_adapter
    mendable = bool(errors) and is_known and all(each.repairable for each in errors)
    return Report(
        str(source),
        opened.kind.value,
        printable(opened.what),
        findings,
        time.perf_counter() - began,
        mendable,
        opened.is_read or not opened.tensors,
        "" if opened.base is None else str(opened.base.folder.root),
        of_base,
    )


def _lines(findings: tuple[Finding, ...]) -> Iterator[str]:
    explained: set[tuple[str, str]] = set()
    for finding in findings:
        yield f"\n{finding.severity.value:<8} {finding.code}  {finding.where}"
        names = ["found", "expected", "why", "fix"]
        if (finding.code, finding.why) in explained:  # most findings of a code have one reason
            names.remove("why")
        explained.add((finding.code, finding.why))
        yield from (f"  {name + ':':<10}{getattr(finding, name)}" for name in names)
