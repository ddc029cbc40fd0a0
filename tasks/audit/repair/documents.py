"""Documents: ids that end a text, labels of a head, its name, settings of the base."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tasks.audit.catalogue import configuration as say
from tasks.audit.checks.configuration import (
    COMPUTE,
    GENERIC_TOKENIZER,
    NEW_TOKENIZER,
    PROCESSOR_FILES,
    old_rope,
)
from tasks.audit.checks.heads import opened
from tasks.audit.checks.text.special_tokens import GENERATION
from tasks.audit.checks.text.template_text import EOS, BrokenTemplateError, read_template
from tasks.audit.checks.text.templates import template_places
from tasks.audit.checks.text.tokens import SETTINGS, TOKENIZER, read_tokens
from tasks.audit.config_fields import of_text, text_config, token_ids
from tasks.audit.finding import Finding
from tasks.audit.recognise import CONFIG, Kind
from tasks.audit.repair.draft import Draft
from tasks.audit.source import Source
from tasks.weights.heads.detect import detect
from tasks.weights.heads.folder import hidden_size

_ENDS = ("EOS_DISAGREES", "EOS_NOT_TEMPLATE_END", "EOS_CONFIGS_DIFFER", "EOS_MISSING")
_LABELS = ("HEAD_LABELS",)
_NAME = ("HEAD_PREFIX",)
TOKENIZER_CLASS, PROCESSOR_MISSING = say.TOKENIZER_CLASS.code, say.PROCESSOR_MISSING.code
ROPE_FORM = say.ROPE_FORM.code
_SETTINGS = (say.CONFIG_CHANGED.code, say.ROPE_THETA_ABSENT.code)
_ROPE = (
    "rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq",
    "partial_rotary_factor",
)  # fmt: skip


def align_documents(draft: Draft, findings: Iterable[Finding]) -> None:
    """Repair what findings tell of: nothing is changed that nobody complained about."""
    findings = list(findings)
    codes = {one.code for one in findings}
    if TOKENIZER_CLASS in codes:
        _name_tokenizer(draft)
    if draft.source.is_model:
        _take_settings(draft, {one.tensor for one in findings if one.code in _SETTINGS})
        if ROPE_FORM in codes:
            _say_rope_twice(draft)
        if PROCESSOR_MISSING in codes:
            _take_processor(draft)
    if codes & {*_ENDS} and draft.source.is_model:
        _align_ends(draft)
    if codes & {*_LABELS, *_NAME} and draft.source.kind is Kind.REWARD:
        _align_head(draft, codes)


def _name_tokenizer(draft: Draft) -> None:
    """Name a class that transformers 4 has, too: the base's, else the generic one."""
    source = draft.source
    base = source.base.config(SETTINGS).get("tokenizer_class") if source.base is not None else None
    name = base if isinstance(base, str) and base != NEW_TOKENIZER else GENERIC_TOKENIZER
    if TOKENIZER in source.folder.files:
        draft.edit(SETTINGS, tokenizer_class=name)
        draft.done.append(f"{SETTINGS}: tokenizer_class {name}")


def _take_settings(draft: Draft, names: set[str]) -> None:
    """Take the base's value of settings that training does not change."""
    base = draft.source.base
    if base is None:
        return
    theirs = text_config(base.config())
    wanted: dict[str, Any] = {name: of_text(base.config(), name) for name in names & {*COMPUTE}}
    if any(name.startswith("rope") for name in names):
        wanted |= {name: theirs.get(name) for name in _ROPE}
    if wanted:
        _edit_text(draft, wanted)
        told = ", ".join(f"{name} {value!r}" for name, value in wanted.items() if value is not None)
        draft.done.append(f"{CONFIG}: {told}, as the base has")


def _say_rope_twice(draft: Draft) -> None:
    """Write the rotary settings as transformers 4 reads them, beside those of transformers 5."""
    old = old_rope(text_config(draft.documents.get(CONFIG, draft.source.config())))
    if old:
        _edit_text(draft, old)
        draft.done.append(f"{CONFIG}: {', '.join(old)} beside rope_parameters")


def _edit_text(draft: Draft, changes: Mapping[str, Any]) -> None:
    """Change settings of the language model where they lie; None takes one away."""
    config = {**draft.documents.get(CONFIG, draft.source.config())}
    inner = text_config(config)
    at = next((name for name, value in config.items() if value is inner), "")
    edited = {**(inner if at else config), **changes}
    for name in [name for name, value in changes.items() if value is None]:
        del edited[name]
    draft.documents[CONFIG] = {**config, at: edited} if at else edited


def _take_processor(draft: Draft) -> None:
    base = draft.source.base
    for name in PROCESSOR_FILES if base is not None else ():
        document = base.config(name) if base is not None else {}
        if document:
            draft.documents[name] = dict(document)
            draft.done.append(f"{name}: that of the base")


def _align_ends(draft: Draft) -> None:
    """Stop at everything that ends a text by anybody: more ends lose no text of the model's own."""
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
    said: int | list[int] = next(iter(ids)) if len(ids) == 1 else list(ids)
    draft.edit(GENERATION, eos_token_id=said)
    draft.done.append(f"{GENERATION}: eos_token_id {said}")


def _align_head(draft: Draft, codes: set[str]) -> None:
    head = detect(opened(draft.source)).head
    if head is None or head.shape != (1, hidden_size(draft.source.config())):
        return  # a classifier's labels, or a head that is none, is not ours to name
    if codes & {*_LABELS}:
        labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "num_labels": 1}
        draft.edit(CONFIG, **labels)
        draft.done.append(f"{CONFIG}: one label")
    if codes & {*_NAME}:
        name = head.weight.partition(":")[2].partition(".")[0]
        draft.edit(CONFIG, value_head_prefix=name)
        draft.done.append(f"{CONFIG}: value_head_prefix {name}")


def _ends_of_texts(source: Source) -> Iterator[int]:
    """Ids that the tokenizer and its chat template end a text with, the tokenizer's own first."""
    tokens = read_tokens(source.folder)
    said = source.config(SETTINGS).get("eos_token")
    said = said.get("content") if isinstance(said, dict) else said
    eos = tokens.id_of(said) if isinstance(said, str) else None
    if eos is not None:
        yield eos
    for text in template_places(source).values():
        try:
            ends = read_template(text, tokens.special).ends
        except BrokenTemplateError:
            continue  # a finding of its own
        ids = (None if one == EOS else tokens.id_of(one) for one in sorted(ends))
        yield from (one for one in ids if one is not None)
