"""A problem with a configuration, as it is shown to the user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tasks.core.errors import ConfigError


@dataclass(frozen=True)
class Finding:
    """One invalid or suspicious setting: an error refuses the run, a warning is shown.

    `allowed` says what is allowed, or why the value is not; `override` what to type instead.
    """

    what: str
    found: str
    allowed: str
    override: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        return f"{self.what}: {self.found}; {self.allowed} -> {self.override}"


def preflight(problems: Sequence[Finding]) -> list[Finding]:
    """Raise one error with every problem, and return the warnings.

    Raises:
        ConfigError: there are errors; its details have one line each.
    """
    errors = [finding for finding in problems if finding.severity == "error"]
    if errors:
        count = f"{len(errors)} problem{'s' * (len(errors) > 1)}"
        raise ConfigError(
            f"the preflight found {count}; nothing was started",
            details=[str(finding) for finding in errors],
        )
    return [finding for finding in problems if finding.severity == "warning"]
