"""The one tree of errors.

    PlumblineError                 anything Plumbline raises on purpose
    |-- ConfigError                configuration or preflight: nothing was started        exit 2
    |-- DataError                  the user's data cannot be used as it is
    |-- ArtifactError              an artifact is missing, altered or unreadable
    |-- ContractError              what a stage made is not what it had to make
    |-- DriftError                 a hand-off moved the model further than the profile allows
    |-- TrainingError              training cannot go on (a loss that is not finite, ...)
    |   `-- RewardError            a reward could not be had; names the source and the prompt
    |-- StageProcessError          a child process ended badly
    `-- BusyError                  somebody else is using the same `paths.runs`

A message says what was asked, what was found, what is allowed and what to type.
`str(error)` is one line where it can be (orchestrators repeat it several times); longer material
sits in `details`. All of them survive pickling, since orchestrators pickle them.
"""

from __future__ import annotations

from collections.abc import Sequence


class PlumblineError(Exception):
    """Base of every deliberate error.

    Args:
        message: one line: what was asked, what was found.
        details: further lines (findings, the tail of a child's output).
        hint: what to do or type next.
    """

    exit_code = 1
    stage = ""
    """The stage that failed; the mechanism fills it in."""
    log = ""
    """The log of that stage's children; filled in likewise, where there is one."""

    def __init__(self, message: str, *, details: Sequence[str] = (), hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.details = tuple(details)
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.__dict__))

    def report(self) -> str:
        """The whole error as a person should read it: message, details, what to do, log."""
        named = f"{self.stage} failed: " if self.stage else ""
        lines = [named + self.message.removeprefix(f"{self.stage}: ")]
        told = len(self.details) == 1 and self.details[0] in self.message  # nothing to add
        lines += [] if told else [f"  {line}" for line in self.details]
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
    """The configuration, or what the preflight found, rules the run out. Nothing was started."""

    exit_code = 2


class DataError(PlumblineError, ValueError):
    """The data cannot be used as it is; details name file, line and what is wrong."""


class ArtifactError(PlumblineError):
    """An artifact is missing, altered or unreadable."""


class ContractError(PlumblineError):
    """A stage's output is not what its contract demands; details name every tensor."""


class DriftError(PlumblineError):
    """A hand-off moved the model further than the drift profile allows."""


class TrainingError(PlumblineError):
    """Training cannot go on; the message names the step."""


class RewardError(TrainingError):
    """A reward could not be had: its source failed, or gave something that is no number."""


class BusyError(PlumblineError):
    """Another run holds the same `paths.runs`."""


class StageProcessError(PlumblineError):
    """A child process failed.

    Args:
        stage: the stage that started it.
        returncode: its exit status; negative for a signal, None when unknown.
        tail: its last lines of output, oldest first.
        reason: "exit", "timeout" or "cancelled".
    """

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
    """One line for several findings: the first, and how many more the details hold.

    Args:
        findings: at least one; all of them belong into the error's `details`.

    Raises:
        ValueError: there is nothing to report.
    """
    if not findings:
        raise ValueError("no findings: there is no error to report")
    return findings[0] + (f" (and {len(findings) - 1} more)" if len(findings) > 1 else "")
