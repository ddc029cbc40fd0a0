"""A problem with a configuration, as it is shown to the user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One invalid or suspicious setting. An error refuses the run; a warning is shown.

    Attributes:
        what: the setting, or the part of the machine.
        found: its value.
        allowed: what is allowed, or why the value is not.
        override: what to type instead.
        severity: `error` or `warning`.
    """

    what: str
    found: str
    allowed: str
    override: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        return f"{self.what}: {self.found}; {self.allowed} -> {self.override}"
