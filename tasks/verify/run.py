"""Run all checks of a running server, one after the other.

target = choose(server.models(), source, model=None, base=None)     names on the server
report = verify(server, target, reference, "standard")
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.core.errors import ConfigError, PlumblineError
from tasks.core.report import Row
from tasks.drift.fingerprint import PROFILES
from tasks.verify.asked import Asked
from tasks.verify.checks.load import batching, leak, long_prompts, prefix_cache, streaming
from tasks.verify.checks.prompt import context, eos, template, tokens
from tasks.verify.checks.sampling import sampling
from tasks.verify.checks.weights import adapter, base, distribution
from tasks.verify.reference import Reference
from tasks.verify.report import Report
from tasks.verify.servers.server import ServedModel, Server

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
