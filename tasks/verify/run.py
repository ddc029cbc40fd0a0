"""Run all checks of a running server, one after the other.

target = choose(server.models(), source, model=None, base=None)     names on the server
report = verify(server, target, reference, "standard")
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tasks.core.errors import ConfigError, PlumblineError
from tasks.core.report import Row
from tasks.verify.asked import Asked
from tasks.verify.checks.ending import context, eos
from tasks.verify.checks.load import batching, leak, long_prompts, prefix_cache, streaming
from tasks.verify.checks.prompt import template, tokens
from tasks.verify.checks.sampling import sampling
from tasks.verify.checks.weights import adapter, base, distribution
from tasks.verify.reference import Reference
from tasks.verify.report import Report
from tasks.verify.servers.server import ServedModel, Server, ServerError

CheckFunction = Callable[[Asked], Row]
CHECKS: Mapping[str, CheckFunction] = {
    "distribution": distribution,
    "adapter": adapter,
    "base": base,
    "template": template,
    "tokens": tokens,
    "eos": eos,
    "context": context,
    "sampling": sampling,
    "leak": leak,
    "batching": batching,
    "prefix-cache": prefix_cache,
    "long-prompts": long_prompts,
    "streaming": streaming,
}
"""All checks by name, in their order; `adapter` and `base` run for adapters only."""
GONE = ("unreachable", "login")
"""Codes of a `ServerError` after which no request will be answered."""


@dataclass(frozen=True)
class Target:
    """Names on the server: the model to check, and its base; None if the server says none."""

    model: str
    base: str | None


def choose(
    served: Sequence[ServedModel], source: Path, *, model: str | None, base: str | None
) -> Target:
    """Return the names of the model and of its base.

    Args:
        served: models of the server.
        source: folder of the reference.
        model: the user's choice; None for the only model, or the one that was loaded from `source`.
        base: the user's choice; None for the parent that the server names.

    Raises:
        ConfigError: with a line for each name that is not clear.
    """
    by_name = {entry.name: entry for entry in served}
    names = ", ".join(by_name) or "none"
    problems = [
        f"{key}={name}: the server has no such model; it has {names} -> {key}=<one of them>"
        for key, name in (("name", model), ("base", base))
        if name is not None and name not in by_name
    ]
    if model is None:
        loaded = [entry.name for entry in served if _is(entry.root, source)]
        candidates = loaded or list(by_name)
        if len(candidates) == 1:
            model = candidates[0]
        else:
            problems.append(
                f"model: the server has several models: {names} -> name=<the one of {source}>"
                if served
                else "model: the server names no model -> name=<its name on the server>"
            )
    if problems or model is None:
        raise ConfigError("the model to verify is not clear", details=problems)
    parent = by_name[model].parent
    return Target(model, base or (parent if parent in by_name else None))


def _is(root: str | None, source: Path) -> bool:
    """Return True if a server loaded its model from a folder of this machine."""
    return (
        root is not None and Path(root).is_absolute() and Path(root).resolve() == source.resolve()
    )


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
    checks = run_checks(Asked(server, target.model, target.base, reference, profile), only)
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
    """Run the checks that apply, each on the answers that the earlier ones got."""
    left_out = set()
    if asked.reference.base is None:
        left_out = {"adapter", "base"}
    elif asked.base is None:
        left_out = {"base"}
    checks: list[Row] = []
    gone = ""
    for name, check in CHECKS.items():
        if name in left_out or (only and name not in only):
            continue
        if gone:
            checks.append(Row(name, "unknown", gone))
            continue
        made, gone = attempt(name, partial(check, asked))
        checks.append(made)
    return tuple(checks)


def attempt(name: str, check: Callable[[], Row]) -> tuple[Row, str]:
    """Run one check; one that raises has proven nothing, and is "unknown" with its reason.

    Returns also the reason why no other one can be run, if the server has gone; else "".
    """
    try:
        return check(), ""
    except PlumblineError as error:
        reason = "; ".join(filter(None, (error.message, error.hint)))
        is_gone = isinstance(error, ServerError) and error.code in GONE
        return Row(name, "unknown", reason), reason if is_gone else ""
    except Exception as error:
        reason = f"the check itself failed: {type(error).__name__}: {error}"
        return Row(name, "unknown", reason), ""
