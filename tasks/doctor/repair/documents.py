"""What the documents say: ids that end a text, labels of a head, its name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tasks.doctor.finding import Finding
from tasks.doctor.heads import opened
from tasks.doctor.recognise import CONFIG, Kind
from tasks.doctor.repair.draft import Draft
from tasks.doctor.said import of_text, token_ids
from tasks.doctor.source import Source
from tasks.doctor.special_tokens import GENERATION
from tasks.doctor.template_text import EOS, BrokenTemplateError, read_template
from tasks.doctor.templates import template_places
from tasks.doctor.tokens import SETTINGS, read_tokens
from tasks.weights.heads.detect import detect
from tasks.weights.heads.folder import hidden_size

_ENDS = ("EOS_DISAGREES", "EOS_NOT_TEMPLATE_END", "EOS_CONFIGS_DIFFER", "EOS_MISSING")
_LABELS = ("HEAD_LABELS",)
_NAME = ("HEAD_PREFIX",)


def align_documents(draft: Draft, findings: Iterable[Finding]) -> None:
    """Repair what findings tell of: nothing is changed that nobody complained about."""
    codes = {one.code for one in findings}
    if codes & {*_ENDS} and draft.source.is_model:
        _align_ends(draft)
    if codes & {*_LABELS, *_NAME} and draft.source.kind is Kind.REWARD:
        _align_head(draft, codes)


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
