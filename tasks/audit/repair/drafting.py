"""From a folder to a draft of its repair, from headers and documents alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tasks.audit.catalogue import values
from tasks.audit.checks.heads import opened
from tasks.audit.examine import CANNOT_GO_ON, examine
from tasks.audit.finding import Finding, Severity
from tasks.audit.recognise import Kind
from tasks.audit.repair.documents import align_documents
from tasks.audit.repair.draft import Draft, begin
from tasks.audit.repair.keys import strip_residue
from tasks.audit.source import Source
from tasks.weights.heads.detect import Found, detect

_UNTIED = values.TIED_HEAD_DIFFERS.code
HEAD = "value_head"
"""Folder of a head that was split off: below the model's, where no loader looks for weights."""


def drafted(source: Source, findings: Sequence[Finding]) -> tuple[Draft, Found | None]:
    """The draft, and the value head that it splits off. `refused` of it says what it cannot do.

    Args:
        source: a model or an adapter.
        findings: what is wrong with it.
    """
    draft = begin(source)
    found = _split_head(draft)
    strip_residue(draft)
    align_documents(draft, findings)
    return draft, found


def would_mend(source: Source, findings: Sequence[Finding]) -> bool:
    """Whether a repair leaves no error, as far as headers and documents tell."""
    wrong = {one.code for one in errors_of(findings)}
    if not wrong or not (source.is_model or source.is_adapter):
        return False
    try:
        if source.values:
            by_headers = errors_of(examine(replace(source, values=False)))
            if not wrong <= {_UNTIED, *(one.code for one in by_headers)}:
                return False  # no other names and no other documents change the data
        draft, _ = drafted(source, findings)
        if draft.refused or not (draft.done or _UNTIED in wrong):
            return False
        return not errors_of(examine(draft.as_source()))
    except CANNOT_GO_ON:
        return False  # of documents that were made to mislead: their findings say so


def errors_of(findings: Sequence[Finding]) -> list[Finding]:
    """Those that are errors."""
    return [one for one in findings if one.severity is Severity.ERROR]


def _split_head(draft: Draft) -> Found | None:
    """Take a value head out of the model. Raises nothing: what is wrong with it is a finding."""
    if draft.source.kind is not Kind.VALUE and not draft.source.is_adapter:
        return None
    found = detect(opened(draft.source))
    head = found.head
    if head is None or found.findings or head.dialect not in ("trl", "llamafactory"):
        return None
    keys = {one.partition(":")[2] for one in head.sources}
    draft.names = {new: old for new, old in draft.names.items() if old not in keys}
    draft.head = tuple(sorted(keys))
    draft.done.append(f"the value head in {HEAD}/")
    return found
