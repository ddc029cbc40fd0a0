"""A finding of an audit, and the catalogue entry that all findings of one code share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from tasks.audit.source import Source

_SHOWN = 3
_WIDTH = 300


class Severity(StrEnum):
    """Severity of a finding.

    `ERROR`: a tool fails on the checkpoint, or the model is not the one that was trained.
    `WARNING`: the same, under a condition that the finding names.
    `INFO`: worth knowing.
    """

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


@dataclass(frozen=True)
class Entry:
    """A finding code with its explanation. Checks create their findings with `at` or `of`.

    Attributes:
        severity: usual severity; a check may raise or lower it.
        title: one line for `docs/findings.md`.
        why: the failure that it causes, and the tool that fails.
        fix: what to do; a check may replace it by an exact command.
        reported: public reports of the failure, as "project #number, project PR #number".
        code: stable, short identifier; the name of the entry in its section.
    """

    severity: Severity
    title: str
    why: str
    fix: str
    reported: str = ""
    code: str = field(init=False, default="")

    def __set_name__(self, section: type, name: str) -> None:
        object.__setattr__(self, "code", name)

    @property
    def issues(self) -> tuple[str, ...]:
        """Public reports of the failure, one by one."""
        return tuple(self.reported.split(", ")) if self.reported else ()

    def at(
        self,
        file: str,
        tensors: str | Collection[str] = "",
        *,
        found: str,
        expected: str,
        fix: str = "",
        severity: Severity | None = None,
    ) -> Finding:
        """Create a finding of this code.

        Args:
            file: file relative to the source; "" for the folder as a whole.
            tensors: name of the tensor; several names give one finding.
            found: the value or state in the checkpoint.
            expected: the value or state that is correct.
            fix: replaces the general advice of the entry.
            severity: replaces the usual severity of the entry.
        """
        names = printable(tensors) if isinstance(tensors, str) else some(tensors)
        return Finding(
            self.code,
            severity or self.severity,
            printable(file),
            names,
            printable(found),
            printable(expected),
            self.why,
            fix or self.fix,
        )

    def of(
        self,
        source: Source,
        names: Collection[str],
        *,
        found: str,
        expected: str,
        fix: str = "",
        severity: Severity | None = None,
    ) -> Iterator[Finding]:
        """Yield a finding about tensors, at the file of the first one; nothing without names.

        Args:
            source: the folder.
            names: names of the tensors that have this fault.
            found: as in `at`, and so are `expected`, `fix` and `severity`.
        """
        if names:
            first = source.tensors.get(next(iter(names)))
            file = first.file if first is not None else ""
            yield self.at(file, names, found=found, expected=expected, fix=fix, severity=severity)


error = partial(Entry, Severity.ERROR)
warning = partial(Entry, Severity.WARNING)
info = partial(Entry, Severity.INFO)


class Section:
    """A section of `docs/findings.md`: entries in the order of the page, named by their codes.

    Attributes:
        heading: heading of the section.
    """

    heading: ClassVar[str]

    def __init_subclass__(cls, heading: str) -> None:
        cls.heading = heading

    @classmethod
    def entries(cls) -> list[Entry]:
        """Return the entries of this section."""
        return [entry for entry in vars(cls).values() if isinstance(entry, Entry)]


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
