"""Findings: what is wrong with which line. Collected while reading, told all at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from tasks.core.errors import DataError

SHOWN = 20


@dataclass
class Findings:
    """The lines that cannot be used. Keeps the first `SHOWN` texts and the total."""

    total: int = 0
    shown: list[str] = field(default_factory=list)

    def add(self, place: str, problem: str) -> None:
        """Note one bad line. `place` is `file:line`."""
        self.total += 1
        if len(self.shown) < SHOWN:
            self.shown.append(f"{place}: {problem}")

    def lines(self) -> list[str]:
        """The findings as text, with a closing line where some are not shown."""
        rest = self.total - len(self.shown)
        return [*self.shown, f"... and {rest} more"] if rest else list(self.shown)

    def raise_if_any(self, *, read: int) -> None:
        """Raise one `DataError` that lists the bad lines of `read` rows."""
        if not self.total:
            return
        raise DataError(
            f"{self.total} of {read} rows cannot be used, first {self.shown[0]}",
            details=self.lines(),
            hint="mend the rows, or leave them out, counted: data.on_bad_line=skip",
        )
