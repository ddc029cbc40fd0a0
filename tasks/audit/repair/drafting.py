"""Make the draft of a repair, from headers and JSON files alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from tasks.audit.catalogue.files import Folders
from tasks.audit.catalogue.values import Values
from tasks.audit.checks.heads import head_folder
from tasks.audit.checks.wrapper_prefixes import TRL_WRAPPER
from tasks.audit.examine import CANNOT_GO_ON, examine
from tasks.audit.finding import Finding, Severity
from tasks.audit.recognise import Kind
from tasks.audit.repair.documents import align_documents
from tasks.audit.repair.draft import Draft, begin
from tasks.audit.source import Source
from tasks.weights.files.names import PEFT_PREFIX, unwrap
from tasks.weights.heads.detect import Found, detect

_UNTIED = Values.TIED_HEAD_DIFFERS.code
HEAD = "value_head"
"""Subfolder of a head that was split off; no loader looks for weights in it."""
_INFIX = re.compile(r"\.base_layer\.|\.modules_to_save\.[^.]+\.")
_ORIGINAL = ".original_module."
"""Part of the key of an untrained copy, which PEFT keeps beside a module of `modules_to_save`."""
_LORA = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(\.|$)")
_NAMED = (
    (re.compile(r"(?P<at>.+\.lora_[AB])\.(?!(?:weight|bias)$)[^.]+(?P<tail>\.weight|\.bias)"),
     r"\g<at>\g<tail>"),
    (re.compile(r"(?P<at>.+\.lora_embedding_[AB])\.[^.]+"), r"\g<at>"),
    (re.compile(r"(?P<at>.+\.lora_magnitude_vector)\.[^.]+(\.weight)?"), r"\g<at>"),
    (re.compile(r"(?P<at>.+)\.modules_to_save\.[^.]+(?P<tail>\.(weight|bias))"), r"\g<at>\g<tail>"),
    (re.compile(r"(?P<at>.+\.trainable_tokens_delta)\.[^.]+"), r"\g<at>"),
)  # fmt: skip
"""Pattern of a key of a PEFT model in memory, and the key in its file."""


def drafted(source: Source, findings: Sequence[Finding]) -> tuple[Draft, Found | None]:
    """Return the draft of a repair, and the value head that it splits off.

    `Draft.refused` lists what the draft cannot repair.

    Args:
        source: a model or an adapter.
        findings: the findings of its audit.
    """
    draft = begin(source)
    head = _split_head(draft)
    _strip_residue(draft)
    align_documents(draft, findings)
    altered = [finding for finding in findings if finding.code == Folders.MANIFEST_DIFFERS.code]
    draft.refused += [f"{finding.code}: {finding.found}" for finding in altered]
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


def _strip_residue(draft: Draft) -> None:
    """Remove wrapper prefixes from every name; refuse if two tensors would share a name."""
    is_adapter = draft.source.is_adapter
    if not is_adapter:
        lora = [key for key in draft.names if _LORA.search(key)]
        if lora:
            draft.refused.append(
                f"{lora[0]}: the adapter was never merged into these weights: save it as an "
                "adapter, and deliver that with its base"
            )
            return
        for key in [key for key in draft.names if _ORIGINAL in key]:
            del draft.names[key]
            draft.done.append(f"{key}: left out, the trained copy is kept")
    names: dict[str, str] = {}
    for new, old in draft.names.items():
        clean = _adapter_name(new) if is_adapter else _model_name(new)
        if clean in names:
            draft.refused.append(f"{old} and {names[clean]}: both would be named {clean}")
        names[clean] = old
    changed = [(old, new) for new, old in names.items() if new != old]
    if changed:
        old, new = changed[0]
        draft.done.append(f"{len(changed)} keys without wrapper prefixes: {old} is now {new}")
    draft.names = names


def _model_name(key: str) -> str:
    plain = unwrap(key).removeprefix(TRL_WRAPPER)
    return _INFIX.sub(".", unwrap(plain).removeprefix(PEFT_PREFIX))


def _adapter_name(key: str) -> str:
    plain = unwrap(key)
    if "v_head." in plain:
        return plain
    for live, kept in _NAMED:
        match = live.fullmatch(plain)
        if match:
            plain = match.expand(kept)
    return plain if plain.startswith(PEFT_PREFIX) else f"{PEFT_PREFIX}{plain}"
