"""Run all checks on an opened source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tasks.audit import class_contract
from tasks.audit.catalogue.files import Folders
from tasks.audit.checks import (
    against_base,
    architecture,
    configuration,
    experts,
    files,
    folder_checks,
    headers,
    heads,
    hub_cache,
    quantisation,
    serving,
    unsafe,
    values,
    witness,
    wrapper_prefixes,
    zero,
)
from tasks.audit.checks.adapters import adapter, adapter_base, merge_plan, merge_proof, rounding
from tasks.audit.checks.text import special_tokens, templates, token_ids, vocabulary
from tasks.audit.finding import Finding, Severity
from tasks.audit.source import Source
from tasks.core.errors import ArtifactError

Check = Callable[[Source], Iterator[Finding]]

CHECKS: Sequence[Check] = (
    folder_checks.check,
    hub_cache.check,
    files.check,
    wrapper_prefixes.check,
    headers.check,
    zero.check,
    heads.check,
    adapter.check,
    adapter_base.check,
    witness.check,
    vocabulary.check,
    token_ids.check,
    special_tokens.check,
    templates.check,
    architecture.check,
    experts.check,
    quantisation.check,
    quantisation.check_dtypes,
    serving.check,
    configuration.check,
    against_base.check,
    unsafe.check,
    values.check,
    merge_proof.check,
    rounding.check,
    class_contract.check,
)
"""In the order of the report: causes come before their consequences."""

CANNOT_GO_ON = (
    ArtifactError, ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip
"""Exceptions that a check may raise on malicious files."""


def examine(source: Source, *, plan: bool = False) -> list[Finding]:
    """Return the findings of all checks without duplicates, the worst first.

    Args:
        source: the folder.
        plan: plan the merge of an adapter, too, if nothing else is wrong with it.
    """
    seen: dict[Finding, None] = {}
    for check in CHECKS:
        seen |= dict.fromkeys(_findings(check, source))
    if plan and not any(finding.severity is Severity.ERROR for finding in seen):
        seen |= dict.fromkeys(_findings(merge_plan.check, source))
    return sorted(seen, key=lambda finding: finding.severity.rank)


def _findings(check: Check, source: Source) -> Iterator[Finding]:
    try:
        yield from check(source)
    except CANNOT_GO_ON as error:
        # An error: a folder that cannot be checked must never pass.
        name = check.__module__.rpartition(".")[2]
        reason = f"{name}: {type(error).__name__}: {error}"
        yield Folders.CANNOT_JUDGE.at("", found=reason, expected="files as known tools write them")
