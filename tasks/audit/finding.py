"""What the doctor says: one finding, stable enough for scripts, plain enough for people."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any

_SHOWN = 3
_WIDTH = 300


class Severity(StrEnum):
    """`ERROR`: a tool will fail on it, or the model is not the one that was trained. `WARNING`: it
    fails under a condition that is named. `INFO`: worth knowing."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def rank(self) -> int:
        """0 for what comes first in a report."""
        return list(Severity).index(self)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing.

    Attributes:
        code: stable and short; the key into `docs/findings.md`.
        severity: how bad it is.
        file: file or folder, relative to the source; "" for the folder as a whole.
        tensor: the tensor, or the first few of several; "" where it is about none.
        found: what is there.
        expected: what has to be there.
        why: the failure that it causes, and in which tool.
        fix: what to do; the exact command where there is one.
    """

    code: str
    severity: Severity
    file: str
    tensor: str
    found: str
    expected: str
    why: str
    fix: str

    @property
    def where(self) -> str:
        """File and tensor in one line."""
        return ": ".join(part for part in (self.file, self.tensor) if part) or "."

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
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
    """The first few of several names, and how many more there are."""
    if not isinstance(names, Collection):
        names = list(names)
    text = ", ".join(printable(str(one)) for one in islice(names, _SHOWN))
    return text + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def printable(text: str) -> str:
    """Text that a file brought along, of bounded length, without a terminal's control codes."""
    cut = text if len(text) <= _WIDTH else text[:_WIDTH] + "..."
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in cut)
