"""Repair JSON files and templates: EOS ids, tokenizer class, byte-order marks, settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tasks.audit.catalogue.model import Configuration
from tasks.audit.catalogue.text import Templates, TokenIds
from tasks.audit.checks.configuration import (
    COMPUTE,
    GENERIC_TOKENIZER,
    old_rope,
)
from tasks.audit.checks.text.special_tokens import GENERATION
from tasks.audit.checks.text.template_text import EOS, BrokenTemplateError, read_template
from tasks.audit.checks.text.templates import JINJA, MARK, template_places
from tasks.audit.checks.text.tokens import SETTINGS, TOKENIZER, read_tokens
from tasks.audit.config_fields import content, of_text, text_config, token_ids
from tasks.audit.finding import Finding
from tasks.audit.recognise import CONFIG
from tasks.audit.repair.draft import Draft
from tasks.audit.source import Source

_ENDS = ("EOS_DISAGREES", "EOS_NOT_TEMPLATE_END", "EOS_CONFIGS_DIFFER", "EOS_MISSING")
_SETTINGS = (Configuration.CONFIG_CHANGED.code, Configuration.ROPE_THETA_ABSENT.code)
_ROPE = (
    "rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq",
    "partial_rotary_factor",
)  # fmt: skip


def align_documents(draft: Draft, findings: Iterable[Finding]) -> None:
    """Repair the JSON files that findings complain about, and nothing else."""
    findings = list(findings)
    codes = {finding.code for finding in findings}
    if codes & {Configuration.TOKENIZER_CLASS.code, TokenIds.TOKENIZER_MISREAD.code}:
        _name_tokenizer(draft)
    if Templates.TEMPLATE_MARK.code in codes:
        _remove_marks(draft)
    if draft.source.is_model:
        _take_settings(draft, {finding.tensor for finding in findings if finding.code in _SETTINGS})
        if Configuration.ROPE_FORM.code in codes or CONFIG in draft.documents:
            _write_old_rope(draft)
    if codes & {*_ENDS} and draft.source.is_model:
        _align_ends(draft)


def _name_tokenizer(draft: Draft) -> None:
    """Name the class that every version has and that reads tokenizer.json as it is."""
    if TOKENIZER not in draft.source.folder.files:
        return
    draft.edit(SETTINGS, tokenizer_class=GENERIC_TOKENIZER)
    more = draft.documents[SETTINGS].get("extra_special_tokens")
    if isinstance(more, list):  # transformers 4 takes a mapping there, and has another key
        draft.edit(SETTINGS, additional_special_tokens=more)
        del draft.documents[SETTINGS]["extra_special_tokens"]
        draft.done.append(f"{SETTINGS}: extra_special_tokens as additional_special_tokens")
    draft.done.append(f"{SETTINGS}: tokenizer_class {GENERIC_TOKENIZER}")


def _remove_marks(draft: Draft) -> None:
    """Remove byte-order marks from all chat templates."""
    for name in [name for name, text in template_places(draft.source).items() if MARK in text]:
        if name == JINJA:
            draft.documents[name] = draft.source.folder.text(name).replace(MARK, "")
        else:
            written = json.dumps(draft.source.config(name)["chat_template"], ensure_ascii=False)
            draft.edit(name, chat_template=json.loads(written.replace(MARK, "")))
        draft.done.append(f"{name}: the chat template without U+FEFF")


def _take_settings(draft: Draft, names: set[str]) -> None:
    """Copy settings from the base that training does not change."""
    base = draft.source.base
    if base is None:
        return
    base_text = text_config(base.config())
    wanted: dict[str, Any] = {name: of_text(base.config(), name) for name in names & {*COMPUTE}}
    if any(name.startswith("rope") for name in names):
        wanted |= {name: base_text.get(name) for name in _ROPE}
    if wanted:
        _edit_text(draft, wanted)
        changes = ", ".join(
            f"{name} {value!r}" for name, value in wanted.items() if value is not None
        )
        draft.done.append(f"{CONFIG}: {changes}, as the base has")


def _write_old_rope(draft: Draft) -> None:
    """Add the rotary settings of transformers 4 beside those of transformers 5."""
    text = text_config(draft.documents.get(CONFIG, draft.source.config()))
    old = old_rope(text)
    if old and not old.items() <= text.items():
        _edit_text(draft, old)
        draft.done.append(f"{CONFIG}: {', '.join(old)} beside rope_parameters")


def _edit_text(draft: Draft, changes: Mapping[str, Any]) -> None:
    """Change settings of the language model; None removes one."""
    config = {**draft.documents.get(CONFIG, draft.source.config())}
    inner = text_config(config)
    at = next((name for name, value in config.items() if value is inner), "")
    edited = {**(inner if at else config), **changes}
    for name in [name for name, value in changes.items() if value is None]:
        del edited[name]
    draft.documents[CONFIG] = {**config, at: edited} if at else edited


def _align_ends(draft: Draft) -> None:
    """Stop at every EOS that any file names: more EOS ids lose no text of the model."""
    source = draft.source
    generation, config = source.config(GENERATION), source.config()
    ids = dict.fromkeys(
        [
            *_ends_of_texts(source),
            *token_ids(generation.get("eos_token_id")),
            *token_ids(of_text(config, "eos_token_id")),
        ]
    )
    if not ids:
        return
    value: int | list[int] = next(iter(ids)) if len(ids) == 1 else list(ids)
    draft.edit(GENERATION, eos_token_id=value)
    draft.done.append(f"{GENERATION}: eos_token_id {value}")


def _ends_of_texts(source: Source) -> Iterator[int]:
    """Yield the EOS ids of the tokenizer and its chat template, the tokenizer's first."""
    tokens = read_tokens(source.folder)
    token = content(source.config(SETTINGS).get("eos_token"))
    eos = tokens.id_of(token) if token else None
    if eos is not None:
        yield eos
    for text in template_places(source).values():
        try:
            ends = read_template(text, tokens.special).ends
        except BrokenTemplateError:
            continue  # the audit reports it
        ids = (None if end == EOS else tokens.id_of(end) for end in sorted(ends))
        yield from (end for end in ids if end is not None)
