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
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

from tasks.audit.check import Finding, Severity, errors_of, examine, printable
from tasks.audit.repair import is_repairable
from tasks.audit.source import command, commands, open_source
from tasks.core.terminal import plain

_WIDTH, _INDENT = 110, 20
_UNREADABLE = ("WEIGHTS_MISSING", "INDEX_WRONG", "INDEX_MISSING_FILE")
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
        """Return the report for a terminal: kind, table of findings with explanations, counts."""
        unread = "" if self.values else "; headers only, values=true reads the weights, too"
        end = [f"\n{self.counts} in {self.seconds:.1f} s{unread}"]
        if self.mendable:
            end.append(f"a copy without the errors: {self.mending}")
        lines = [f"{self.source}: {self.what}", *_table(self.findings), *end]
        if self.of_base is not None and self.of_base.errors:
            lines += ["", f"{self.of_base.source}: the base, not the {self.kind}:"]
            lines += [*_table(self.of_base.errors), "", self.of_base.command]
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
        alone: neither audit the base nor plan the merge into it: `deliver` has done the one and
            does the other itself.

    Raises:
        ArtifactError: `source` or `base` is not a folder, or cannot be listed.
    """
    began = time.perf_counter()
    if values is None and adapter is not None:
        values = True
    opened = open_source(source, base, values=values, adapter=adapter)
    of_base = None
    if opened.base is not None and not opened.base.is_adapter and not alone:
        of_base = audit(opened.base.folder.root, values=values)
        if any(finding.code in _UNREADABLE for finding in of_base.errors):
            opened = replace(opened, base=None)  # its gaps would be reported as the source's
    opened = replace(opened, planned=of_base is not None and of_base.ok)
    findings = tuple(examine(opened))
    mendable = is_repairable(opened, findings)
    seconds = time.perf_counter() - began
    what = printable(opened.recognised.what)
    read = opened.is_read or not opened.tensors
    used = "" if opened.base is None else str(opened.base.folder.root)
    kind = opened.kind.value
    return Report(str(source), kind, what, findings, seconds, mendable, read, used, of_base)


def _table(findings: tuple[Finding, ...]) -> Iterator[str]:
    if not findings:
        return
    code = max(len(finding.code) for finding in findings)
    yield f"\n{'severity':<9} {'code':<{code}}  where"
    yield "-" * _WIDTH
    explained: set[str] = set()
    for finding in findings:
        yield f"{finding.severity.value:<9} {finding.code:<{code}}  {finding.where}"
        names = ["found", "expected", "why", "fix"]
        if finding.code in explained:  # all findings of a code have the same reason
            names.remove("why")
        explained.add(finding.code)
        for name in names:
            yield from _entry(name, getattr(finding, name))


def _entry(name: str, text: str) -> Iterator[str]:
    """Yield a text under its name; a command is one line, to be copied."""
    sentence, begin, command = text.partition("plumbline ")
    first, indent = f"{'':<9} {name:<9} ", " " * _INDENT
    lines = wrap(
        sentence, _WIDTH, initial_indent=first, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    yield from lines
    if begin:
        yield f"{indent if lines else first}{begin}{command}"
