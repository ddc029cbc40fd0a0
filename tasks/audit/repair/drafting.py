"""Make the draft of a repair, from headers and JSON files alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tasks.audit.catalogue.values import Values
from tasks.audit.checks.heads import head_folder
from tasks.audit.examine import CANNOT_GO_ON, examine
from tasks.audit.finding import Finding, Severity
from tasks.audit.recognise import Kind
from tasks.audit.repair.documents import align_documents
from tasks.audit.repair.draft import Draft, begin
from tasks.audit.repair.keys import strip_residue
from tasks.audit.source import Source
from tasks.weights.heads.detect import Found, detect

_UNTIED = Values.TIED_HEAD_DIFFERS.code
HEAD = "value_head"
"""Subfolder of a head that was split off; no loader looks for weights in it."""


def drafted(source: Source, findings: Sequence[Finding]) -> tuple[Draft, Found | None]:
    """Return the draft of a repair, and the value head that it splits off.

    `Draft.refused` lists what the draft cannot repair.

    Args:
        source: a model or an adapter.
        findings: the findings of its audit.
    """
    draft = begin(source)
    head = _split_head(draft)
    strip_residue(draft)
    align_documents(draft, findings)
    return draft, head


def is_repairable(source: Source, findings: Sequence[Finding]) -> bool:
    """Return True if a repair leaves no errors, as far as headers and JSON files tell."""
    wrong = {finding.code for finding in errors_of(findings)}
    if not wrong or not (source.is_model or source.is_adapter):
        return False
    try:
        if source.values:
            by_headers = errors_of(examine(replace(source, values=False)))
            if not wrong <= {_UNTIED, *(finding.code for finding in by_headers)}:
                return False  # a repair does not change tensor data
        draft, _ = drafted(source, findings)
        if draft.refused or not (draft.done or _UNTIED in wrong):
            return False
        return not errors_of(examine(draft.as_source()))
    except CANNOT_GO_ON:
        return False  # malicious files, which have findings of their own


def errors_of(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that are errors."""
    return [finding for finding in findings if finding.severity is Severity.ERROR]


def _split_head(draft: Draft) -> Found | None:
    """Take a value head out of the model. A faulty head is left to the checks."""
    if draft.source.kind is not Kind.VALUE and not draft.source.is_adapter:
        return None
    detected = detect(head_folder(draft.source))
    head = detected.head
    if head is None or detected.findings or head.dialect not in ("trl", "llamafactory"):
        return None
    keys = {file_and_key.partition(":")[2] for file_and_key in head.sources}
    draft.names = {new: old for new, old in draft.names.items() if old not in keys}
    draft.head = tuple(sorted(keys))
    draft.done.append(f"the value head in {HEAD}/")
    return detected
