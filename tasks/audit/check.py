"""The check is the catalogue: a code is declared at the function that looks for it.

    @check("NOT_FINITE", ERROR, needs=(READ,), why="...", fix="...", issues="OpenRLHF #1120")
    def not_finite(source: Source) -> Iterator[Fault]:
        \"\"\"Elements that are infinite or NaN.\"\"\"
        yield Fault("2 elements of 1 tensor", "finite numbers", tensors=["lm_head.weight"])

`examine` runs all checks in the order in which they are declared: causes before consequences.
The docstring is the title on the page of findings, which `make docs` writes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from operator import attrgetter
from typing import Any

from tasks.audit.source import Source, commands
from tasks.core.errors import ArtifactError

_SHOWN, _WIDTH = 3, 300


class Severity(StrEnum):
    """Severity: a tool fails or the model is another one; the same under a condition; a fact."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO
_RANK = list(Severity).index


@dataclass(frozen=True)
class Finding:
    """One fault of a checkpoint, or one fact worth knowing: a `Fault` and its `Check` as text.

    `file` is relative to the source, "" for the folder; `tensor` has the first few names, or "".
    """

    code: str
    severity: Severity
    file: str
    tensor: str
    found: str
    expected: str
    why: str
    fix: str
    repairable: bool = False

    @property
    def where(self) -> str:
        """File and tensor in one line."""
        return ": ".join(part for part in (self.file, self.tensor) if part) or "."

    def as_json(self) -> dict[str, Any]:
        """Return a dict of plain JSON values."""
        names = ("found", "expected", "why", "fix")
        return {
            "code": self.code,
            "severity": self.severity.value,
            "where": {"file": self.file, "tensor": self.tensor},
            **{name: getattr(self, name) for name in names},
        }


def some(names: Iterable[object]) -> str:
    """Return the first few names as text, and the number of the others."""
    if not isinstance(names, Collection):
        names = list(names)
    text = ", ".join(printable(str(name)) for name in islice(names, _SHOWN))
    return text + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def printable(text: str) -> str:
    """Cut text from an untrusted file to a bounded length and escape its control characters."""
    cut = text if len(text) <= _WIDTH else text[:_WIDTH] + "..."
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in cut)


def errors_of(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that are errors."""
    return [finding for finding in findings if finding.severity is ERROR]


Need = Callable[[Source], object]
MODEL: Need = attrgetter("is_model")
ADAPTER: Need = attrgetter("is_adapter")
WHOLE: Need = attrgetter("weights.is_whole")
READ: Need = attrgetter("is_read")
BASE: Need = attrgetter("has_base")


def either(source: Source) -> bool:
    """Return True for a model and for an adapter."""
    return source.is_model or source.is_adapter


@dataclass(frozen=True)
class Fault:
    """One thing that a check reports; code, reason and fix come from its declaration."""

    actual: str  # the value or state in the checkpoint, and the correct one
    expected: str
    # file relative to the source; "" for that of the first tensor, or for the folder
    file: str = ""
    # names of tensors; comparisons of names that come later leave them out
    tensors: Sequence[str] = ()
    severity: Severity | None = None  # this, why and fix replace those declared
    why: str = ""
    fix: str = ""
    repairable: bool = False  # true if `repair` removes it
    code: str = ""  # another declared code than that of the check


Run = Callable[[Source], Iterator[Fault]]


@dataclass(frozen=True)
class Check:
    """A declared code."""

    code: str
    severity: Severity  # usual severity; a fault may raise or lower it
    title: str  # what is reported, in one sentence
    why: str  # the failure that it causes, and the tool that fails
    fix: str  # what to do; `{repair}`, `{deliver}`, ... stand for commands, see `source.commands`
    issues: str  # public reports of the failure, as "project #number, project PR #number"
    module: str
    needs: Sequence[Need]  # conditions without which it does not run
    run: Run


CHECKS: list[Check] = []
"""All checks in the order of the report."""

CANNOT_GO_ON = (
    ArtifactError, ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip
"""Exceptions that a check may raise on malicious files."""


def check(
    code: str, severity: Severity, *, why: str, fix: str, issues: str = "",
    needs: Sequence[Need] = (),
) -> Callable[[Run], Run]:  # fmt: skip
    """Declare a code at the function that looks for it; arguments as in `Check`."""

    def declare(run: Run) -> Run:
        title = (run.__doc__ or "").partition("\n")[0].removesuffix(".")
        CHECKS.append(Check(code, severity, title, why, fix, issues, run.__module__, needs, run))
        return run

    return declare


def examine(source: Source) -> list[Finding]:
    """Return the findings of all checks without duplicates, the worst first."""
    import tasks.audit.checks  # noqa: F401 -- declares them

    base = source.base.root if source.base is not None else None
    needs_base = source.is_adapter or base is not None
    typed = commands(source.root, base, source.adapter, needs_base=needs_base)
    findings: dict[Finding, None] = {}
    for each in CHECKS:
        try:
            if all(need(source) for need in each.needs):
                for fault in each.run(source):
                    _add(findings, source, fault, each, typed)
        except CANNOT_GO_ON as error:
            # An error: a folder that cannot be checked must never pass.
            name = each.module.rpartition(".")[2]
            reason = f"{name}: {type(error).__name__}: {error}"
            fault = Fault(reason, "files as known tools write them", code="CANNOT_JUDGE")
            _add(findings, source, fault, each, typed)
    return sorted(findings, key=lambda finding: _RANK(finding.severity))


def _add(
    findings: dict[Finding, None], source: Source, fault: Fault, by: Check, typed: dict[str, str]
) -> None:
    file = fault.file
    if fault.code:
        by = next(each for each in CHECKS if each.code == fault.code)
    if fault.tensors and not file:
        # Names of modules, which are no keys, are in the only file of an adapter.
        only = source.weights.files[:1] if source.is_adapter else ()
        file = source.weights.file_of.get(fault.tensors[0], "".join(only))
    finding = Finding(
        by.code,
        fault.severity or by.severity,
        printable(file),
        some(fault.tensors) if fault.tensors else "",
        printable(fault.actual),
        printable(fault.expected),
        fault.why or by.why,
        fault.fix or by.fix.format_map(typed),
        fault.repairable,
    )
    findings.setdefault(finding)
    source.codes[by.code] = min(source.codes.get(by.code, INFO), finding.severity, key=_RANK)
    source.explained.update(fault.tensors)
