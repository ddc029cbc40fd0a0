"""Errors that Plumbline raises on purpose, all of them a `PlumblineError`.

A message says what is wrong, where, and what is allowed; the hint says what to type. `str(error)`
is one line if possible, since Prefect prints it several times; longer texts are in `details`. All
errors survive pickling, since Prefect pickles them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tasks.core.terminal import plain

DETAILS_SHOWN = 40
"""Lines of details on a terminal; logs and reports have all of them."""


class PlumblineError(Exception):
    """Base class of all errors that Plumbline raises on purpose; `code` is for programs."""

    exit_code = 1
    stage = ""  # that failed; set by `tasks/pipeline/stage.py`
    log = ""  # of that stage's child processes, if there is one; set there, too

    def __init__(
        self, message: str, *, details: Sequence[str] = (), hint: str = "", code: str = ""
    ) -> None:
        self.message = plain(message)  # names of files and tensors may come from a checkpoint
        self.details = tuple(map(plain, details))
        self.hint = plain(hint)
        super().__init__(self.message)
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.__dict__))

    def report(self) -> str:
        """Return the error as text for a terminal: message, details, hint, log."""
        prefix = f"{self.stage} failed: " if self.stage else ""
        lines = [prefix + self.message.removeprefix(f"{self.stage}: ")]
        repeated = len(self.details) == 1 and self.details[0] in self.message
        lines += [] if repeated else [f"  {line}" for line in self.details[:DETAILS_SHOWN]]
        if len(self.details) > DETAILS_SHOWN:
            lines.append(f"  ... and {len(self.details) - DETAILS_SHOWN} more")
        if self.hint:
            lines.append(f"  -> {self.hint}")
        if self.log:
            lines.append(f"  log: {self.log}")
        return "\n".join(lines)


def _rebuild(cls: type[PlumblineError], message: str, state: dict[str, object]) -> PlumblineError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class ConfigError(PlumblineError, ValueError):
    """The configuration is invalid, or a check before the run failed. Nothing was started."""

    exit_code = 2


class DataError(PlumblineError, ValueError):
    """The user's data cannot be used; details name file, line and mistake."""


class EmptySplitError(DataError):
    """No row is left to train on, or to evaluate on."""


class ArtifactError(PlumblineError):
    """An artifact is missing, altered or unreadable."""


class ContractError(PlumblineError):
    """The output of a stage does not meet its contract; details name every tensor."""

    bound: Mapping[str, Any] | None = None
    """The first distance that exceeds its limit, as in a stored verdict; None if none does."""


class DriftError(PlumblineError):
    """A hand-off changed the model more than the drift profile allows."""


class TrainingError(PlumblineError):
    """Training cannot continue; the message names the step."""


class RewardError(TrainingError):
    """A reward source failed, or returned something that is not a number."""


class TrackingError(PlumblineError):
    """A server does not answer, so that a finished model is not registered."""

    exit_code = 3


class BusyError(PlumblineError):
    """Another run uses the same folder, artifact or GPU."""


class TimeLimitError(PlumblineError):
    """A stage took longer than its setting allows."""


class StageProcessError(PlumblineError):
    """A child process failed: "exit" or "timeout"; `returncode` is negative for a signal."""

    def __init__(
        self, stage: str, returncode: int | None, tail: Sequence[str], reason: str = "exit"
    ) -> None:
        last = next((line.strip() for line in reversed(tail) if line.strip()), "no output")
        super().__init__(
            f"{stage}: child process ended ({reason}, status {returncode}): {last[:200]}",
            details=tail,
        )
        self.stage = stage
        self.returncode = returncode
        self.reason = reason


def first_and_more(findings: Sequence[str]) -> str:
    """Return one line for several findings: the first one, and the number of the others."""
    return findings[0] + (f" (and {len(findings) - 1} more)" if len(findings) > 1 else "")


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
    """Raise one ConfigError with a line for each error; return the warnings if there are none."""
    errors = [finding for finding in problems if finding.severity == "error"]
    if errors:
        count = f"{len(errors)} problem{'s' * (len(errors) > 1)}"
        raise ConfigError(
            f"the preflight found {count}; nothing was started",
            details=[str(finding) for finding in errors],
        )
    return [finding for finding in problems if finding.severity == "warning"]
