"""A finding of an audit: code, place, what is there, what should be, why, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Any

_SHOWN = 3
_WIDTH = 300


class Severity(StrEnum):
    """Severity: a tool fails or the model is another one; the same under a condition; a fact."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def rank(self) -> int:
        """Position in a report: 0 comes first."""
        return list(Severity).index(self)


@dataclass(frozen=True)
class Finding:
    """One fault of a checkpoint, or one fact worth knowing.

    Attributes:
        code: stable, short identifier; the key into `docs/findings.md`.
        severity: how bad it is.
        file: file or folder, relative to the source; "" for the folder as a whole.
        tensor: name of the tensor, or the first few names; "" if the finding is not about tensors.
        found: the value or state in the checkpoint.
        expected: the value or state that is correct.
        why: the failure that it causes, and the tool that fails.
        fix: what to do; the exact command if there is one.
        repair: makes the repair in a draft; None if there is none.
    """

    code: str
    severity: Severity
    file: str
    tensor: str
    found: str
    expected: str
    why: str
    fix: str
    repair: Callable[..., None] | None = field(default=None, compare=False, repr=False)

    @property
    def where(self) -> str:
        """File and tensor in one line."""
        return ": ".join(part for part in (self.file, self.tensor) if part) or "."

    def as_json(self) -> dict[str, Any]:
        """Return a dict of plain JSON values."""
        return {
            "code": self.code,
            "severity": self.severity.value,
            "where": {"file": self.file, "tensor": self.tensor},
            "found": self.found,
            "expected": self.expected,
            "why": self.why,
            "fix": self.fix,
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
    return [finding for finding in findings if finding.severity is Severity.ERROR]
