"""Run all checks of a running server, one after the other, and report.

target = choose(server.models(), source, model=None, base=None)     names on the server
report = verify(server, target, reference, "standard")

The verdict is "verified" if no check found a fault, the served distribution is that of the trained
model, and it is not as near to that of the base; "fault" if a check found one; else "unverified".
What the server's API could not prove is named in every form.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tasks.core import report
from tasks.core.errors import ConfigError, PlumblineError
from tasks.core.report import Cause, Page, Row
from tasks.drift.fingerprint import PROFILES
from tasks.verify.compare import Asked
from tasks.verify.load import batching, leak, long_prompts, prefix_cache, streaming
from tasks.verify.prompt import context, eos, template, tokens
from tasks.verify.reference import Reference
from tasks.verify.sampling import sampling
from tasks.verify.server import ServedModel, Server
from tasks.verify.weights import adapter, base, distribution

DECISIVE = "distribution"
"""Check without which nothing is verified."""
Outcome = Literal["verified", "fault", "unverified"]
EXIT_STATUS: Mapping[Outcome, int] = {"verified": 0, "fault": 1, "unverified": 2}


@dataclass(frozen=True)
class Report(report.Report):
    """Result of one verification."""

    command = "verify"
    url: str  # without a password
    server: str  # dialect and version
    model: str
    base: str | None  # its name on the server; None without an adapter
    source: str  # folder of the reference
    reference: str  # one line about it
    profile: str
    checks: tuple[Row, ...]
    seconds: float

    @property
    def faults(self) -> list[Row]:
        """Checks that found a fault."""
        return [check for check in self.checks if check.failed]

    @property
    def outcome(self) -> Outcome:
        """The verdict; see the module docstring."""
        if self.faults:
            return "fault"
        decisive = [check.verdict for check in self.checks if check.code == DECISIVE]
        return "verified" if decisive == ["ok"] and not self.undecided else "unverified"

    @property
    def undecided(self) -> bool:
        """True if the answers were compared with base and trained model, and could be of either."""
        return any(
            check.code == "adapter" and check.verdict == "unknown" and check.measured
            for check in self.checks
        )

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Likely causes over all checks, each code once, in the order of the checks."""
        by_code: dict[str, Cause] = {}
        for cause in (cause for check in self.faults for cause in check.causes):
            by_code.setdefault(cause.code, cause)
        return tuple(by_code.values())

    @property
    def unproven(self) -> tuple[str, ...]:
        """Names of the checks that the server's API could not answer."""
        return tuple(check.code for check in self.checks if check.verdict == "unknown")

    @property
    def line(self) -> str:
        """The verdict in one line, with what could not be proven."""
        who = f"{self.model} at {self.url}"
        if self.outcome == "fault":
            names = ", ".join(check.code for check in self.faults)
            codes = ", ".join(cause.code for cause in self.causes)
            text = f"FAULT: {who} is not what was trained ({names}{f': {codes}' if codes else ''})"
        elif self.outcome == "verified":
            text = f"verified: {who} is the model of {self.source}"
        elif self.undecided:
            text = f"NOT VERIFIED: {who} may be {self.source} or its base: see adapter"
        else:
            text = f"NOT VERIFIED: {who} could not be compared with {self.source}"
        return f"{text}; not proven: {', '.join(self.unproven)}" if self.unproven else text

    def as_json(self) -> dict[str, Any]:
        """Return the report for programs."""
        checks = [asdict(check) for check in self.checks]
        for check in checks:
            check["name"] = check.pop("code")
            del check["details"]
        return {
            "verdict": self.outcome,
            "line": self.line,
            **vars(self),
            "causes": [cause.code for cause in self.causes],
            "unproven": list(self.unproven),
            "checks": checks,
        }

    def page(self) -> Page:
        """Return the checks, faults first."""
        about = f"{self.url} ({self.server}): {self.model}"
        about += f", base {self.base}" if self.base else ""
        reference = f"reference: {self.source} ({self.reference}), profile {self.profile}"
        line, proves = f"{self.line}; {self.seconds:.1f} s", self.outcome != "unverified"
        subject = self.model or self.source
        return Page(
            [about, reference], self.checks, line, proves=proves, subject=subject,
            seconds=self.seconds,
        )  # fmt: skip


CHECKS = {
    check.__name__.replace("_", "-"): check
    for check in (
        # the weights, and the likely cause if they are others; the last two of adapters only
        *(distribution, adapter, base),
        # what a prompt becomes, and where a response ends
        *(template, tokens, eos, context),
        # the server's own temperature, top-k and top-p
        sampling,
        # alone and in a crowd, again, streamed, and beside other adapters
        *(leak, batching, prefix_cache, long_prompts, streaming),
    )
}
"""All checks by name, in their order: each takes `Asked`, and returns one `Row`."""


@dataclass(frozen=True)
class Target:
    """Names on the server: the model to check, and its base; None if the server says none."""

    model: str
    base: str | None


def choose(
    served: Sequence[ServedModel], source: Path, *, model: str | None, base: str | None
) -> Target:
    """Return the names of the model and of its base, as far as the user has not chosen them.

    The model is the only one, or the one that was loaded from `source`; the base is the parent that
    the server names. Raises ConfigError, with a line for each name that is not clear.
    """
    by_name = {entry.name: entry for entry in served}
    names = ", ".join(by_name) or "none"
    problems = [
        f"{key}={name}: the server has no such model; it has {names} -> {key}=<one of them>"
        for key, name in (("name", model), ("base", base))
        if name is not None and name not in by_name
    ]
    if model is None:
        roots = {entry.name: Path(entry.root).resolve() for entry in served if entry.root}
        loaded = [name for name, root in roots.items() if root == source.resolve()]
        candidates = loaded or list(by_name)
        if len(candidates) == 1:
            model = candidates[0]
        else:
            problems.append(f"model: the server has {names} -> name=<the one of {source}>")
    if problems or model is None:
        raise ConfigError("the model to verify is not clear", details=problems)
    parent = by_name[model].parent
    return Target(model, base or (parent if parent in by_name else None))


def verify(
    server: Server,
    target: Target,
    reference: Reference,
    profile: str,
    *,
    only: Sequence[str] = (),
) -> Report:
    """Run all checks, or `only` some; nothing that goes wrong on the server is raised.

    `profile` is a key of `tasks.drift.fingerprint.PROFILES`.
    """
    began = time.perf_counter()
    asked = Asked(server, target.model, target.base, reference, PROFILES[profile])
    checks = run_checks(asked, only)
    step = reference.facts.get("step")
    about = f"{len(reference.probes)} probes" + (f", step {step}" if step is not None else "")
    return Report(
        server.url,
        f"{server.kind} {server.version}".strip(),
        target.model,
        target.base,
        str(reference.folder),
        about,
        profile,
        checks,
        time.perf_counter() - began,
    )


def run_checks(asked: Asked, only: Sequence[str] = ()) -> tuple[Row, ...]:
    """Run the checks that apply, each on the answers that the earlier ones got.

    One that raises has proven nothing, and is "unknown" with its reason. If the server has gone,
    all others have that reason, too.
    """
    left_out: tuple[str, ...] = ()
    if asked.reference.base is None:
        left_out = ("adapter", "base")
    elif asked.base is None:
        left_out = ("base",)
    rows: list[Row] = []
    reason = gone = ""
    for name, check in CHECKS.items():
        if name in left_out or (only and name not in only):
            continue
        if not gone:
            try:
                rows.append(check(asked))
                continue
            except PlumblineError as error:
                reason = "; ".join(filter(None, (error.message, error.hint)))
                gone = reason if error.code in ("unreachable", "login") else ""
            except Exception as error:
                reason = f"the check itself failed: {type(error).__name__}: {error}"
        rows.append(Row(name, "unknown", reason))
    return tuple(rows)
