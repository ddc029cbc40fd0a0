"""What the preflight finds, in the words that a person needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One problem: what it is about, what was found, what is allowed, what to type.

    An error rules the run out; a warning is shown and the run goes on.
    """

    what: str
    found: str
    allowed: str
    override: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        return f"{self.what}: {self.found}; {self.allowed} -> {self.override}"
