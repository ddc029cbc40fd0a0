"""Every check of a checkpoint, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

from tasks.audit import class_contract
from tasks.audit.catalogue import folder as say
from tasks.audit.checks import (
    against_base,
    architecture,
    configuration,
    dtypes,
    experts,
    files,
    folder_checks,
    headers,
    heads,
    quantisation,
    serving,
    unsafe,
    values,
    wrapper_prefixes,
    zero,
)
from tasks.audit.checks.adapters import adapter, adapter_base, merge_proof
from tasks.audit.checks.text import special_tokens, templates, vocabulary
from tasks.audit.finding import Finding
from tasks.audit.source import Source
from tasks.core.errors import ArtifactError

Check = Callable[[Source], Iterator[Finding]]

FAMILIES: Sequence[ModuleType] = (
    folder_checks,
    files,
    wrapper_prefixes,
    headers,
    zero,
    heads,
    adapter,
    adapter_base,
    vocabulary,
    special_tokens,
    templates,
    architecture,
    experts,
    quantisation,
    dtypes,
    serving,
    configuration,
    against_base,
    unsafe,
    values,
    merge_proof,
    class_contract,
)
"""In the order of the report: a cause comes before the findings that follow from it."""

CANNOT_GO_ON = (
    ArtifactError, ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip
"""Exceptions that a check may raise on documents that were made to mislead it."""


def examine(source: Source) -> list[Finding]:
    """Return the findings of every family, the worst first, each once."""
    found: dict[Finding, None] = {}
    for family in FAMILIES:
        try:
            for one in family.check(source):
                found[one] = None
        except CANNOT_GO_ON as error:
            # An error, so that a folder that cannot be judged is never passed as good.
            name = family.__name__.rpartition(".")[2]
            reason = f"{name}: {type(error).__name__}: {error}"
            as_made = "documents as their writers make them"
            found[say.CANNOT_JUDGE.at("", found=reason, expected=as_made)] = None
    return sorted(found, key=lambda one: one.severity.rank)
