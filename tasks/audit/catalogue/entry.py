"""What is known about one kind of failure, said once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tasks.audit.finding import Finding, Severity, printable, some


@dataclass(frozen=True)
class Entry:
    """A code and what there is to say of it. Families make their findings from these.

    Attributes:
        code: stable and short; also the name of the constant that holds the entry.
        severity: unless a case says otherwise.
        title: one line for the page of findings.
        why: the failure that it causes, and in which tool.
        fix: what to do; a case may know the exact command.
        issues: public reports of it, as "project #number".
    """

    code: str
    severity: Severity
    title: str
    why: str
    fix: str
    issues: tuple[str, ...] = ()

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
        """A finding of this kind.

        Args:
            file: relative to the source; "" for the folder as a whole.
            tensors: the tensor or tensors that it is about: several make one finding.
            found: what is there.
            expected: what has to be there.
            fix: instead of the general advice.
            severity: instead of the usual one.
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


@dataclass(frozen=True)
class Unseen:
    """A reported failure that no look at files can find.

    Attributes:
        issues: public reports of it, as "project #number".
        what: what happened.
        reason: why files do not show it, and what does.
    """

    issues: tuple[str, ...]
    what: str
    reason: str
