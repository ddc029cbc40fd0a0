"""Embeddings, ties and vocabulary: config.json, the tokenizer and the rows that there are."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tasks.audit.catalogue import vocabulary as say
from tasks.audit.checks.text.embeddings import Embeddings, embeddings_of
from tasks.audit.checks.text.tokens import SETTINGS, TOKENIZER, read_tokens
from tasks.audit.config_fields import content, first_architecture, of_text, text_config, whole
from tasks.audit.finding import Finding, Severity
from tasks.audit.recognise import CONFIG, Kind
from tasks.audit.source import Source

_OWN_ROWS = ("mllama", "mllama_text_model", "moshi")
"""Families whose input embedding has rows that are no part of the vocabulary."""
_WHOLE_EMBEDDING = re.compile(r"\.(embed_tokens|lm_head)\.((token_adapter\.)?base_layer\.)?weight$")
_ROLES = ("eos_token", "bos_token", "pad_token", "unk_token")
_GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def check(source: Source) -> Iterator[Finding]:
    """Ties, then rows."""
    if source.is_adapter:
        yield from _adapter_rows(source)
    if not source.is_model or not source.weights.is_whole:
        return
    found = embeddings_of(source.tensors, source.config())
    if not found.input or 0 in source.tensors[found.input].shape:
        return
    if text_config(source.config()).get("model_type") in _OWN_ROWS:
        return
    yield from _ties(source, found)
    yield from _rows(source, found)


def _ties(source: Source, found: Embeddings) -> Iterator[Finding]:
    config = source.config()
    if found.output and found.tied:
        same = source.tensors[found.output].shape == source.tensors[found.input].shape
        yield say.TIED_HEAD_ON_DISK.at(
            source.tensors[found.output].file, found.output,
            found="there, and tie_word_embeddings is true",
            expected="no such tensor, or tie_word_embeddings false",
            severity=None if same else Severity.ERROR,
            fix="where TIED_HEAD_DIFFERS follows, set tie_word_embeddings to false; else remove it"
            if source.values else "",
        )  # fmt: skip
    generates = first_architecture(config).endswith(_GENERATES)
    language = source.kind is Kind.MODEL and generates and not config.get("is_encoder_decoder")
    if language and not found.output and found.tied is False and not _other_heads(source, found):
        yield say.HEAD_NOT_ON_DISK.at(
            CONFIG, found="tie_word_embeddings is false, and no lm_head.weight",
            expected="lm_head.weight, or tie_word_embeddings true",
        )  # fmt: skip


def _other_heads(source: Source, found: Embeddings) -> list[str]:
    """Matrices outside of layers that have a row for every token: some families' `head.weight`."""
    rows = source.tensors[found.input].shape[:1]
    return [
        key
        for key, held in source.tensors.items()
        if key != found.input and len(held.shape) == 2 and held.shape[:1] == rows
        and not any(part.isdecimal() for part in key.split("."))
    ]  # fmt: skip


def _rows(source: Source, found: Embeddings) -> Iterator[Finding]:
    embedding = source.tensors[found.input]
    rows, said = embedding.shape[0], whole(of_text(source.config(), "vocab_size"))
    if said is not None and said != rows:
        yield say.VOCAB_SIZE.at(
            embedding.file, found.input, found=f"{rows} rows, vocab_size {said}", expected="equal"
        )
    if found.output and source.tensors[found.output].shape[:1] != (rows,):
        head = source.tensors[found.output]
        yield say.HEAD_ROWS.at(
            head.file, found.output, found=f"{list(head.shape)}",
            expected=f"{rows} rows, as {found.input} has",
        )  # fmt: skip
    yield from _tokens(source, rows, f"the rows of {found.input}")


def _tokens(source: Source, rows: int, whose: str) -> Iterator[Finding]:
    """Ids beyond the rows; only a warning where all of them are special tokens without a part to
    play: published models have such, for images that they do not see."""
    tokens = read_tokens(source.folder)
    if tokens.rows <= rows:
        return
    beyond = {text for text, number in tokens.added.items() if number >= rows}
    settings = source.config(SETTINGS)
    used = {content(settings.get(role)) for role in _ROLES} & beyond
    plain = tokens.highest_plain >= rows or not beyond <= tokens.special
    yield say.TOKENIZER_ROWS.at(
        TOKENIZER, sorted(used or beyond), found=f"{tokens.rows} ids",
        expected=f"at most {rows}, {whose}", severity=None if used or plain else Severity.WARNING,
    )  # fmt: skip


def _adapter_rows(source: Source) -> Iterator[Finding]:
    """Whole embeddings in an adapter, against each other and the tokenizer beside them."""
    whole_ones = {
        key: held
        for key, held in source.tensors.items()
        if _WHOLE_EMBEDDING.search(key) and len(held.shape) == 2
    }
    rows = {held.shape[0] for held in whole_ones.values()} - {0}
    if len(rows) > 1:
        yield say.HEAD_ROWS.at(
            next(iter(whole_ones.values())).file, list(whole_ones),
            found=" and ".join(f"{one} rows" for one in sorted(rows)), expected="equal",
        )  # fmt: skip
    base = source.base
    found = embeddings_of(base.tensors, base.config()) if base and base.is_model else None
    if not rows and base and found and found.input:
        rows = {base.tensors[found.input].shape[0]}
    if rows:
        yield from _tokens(source, max(rows), "the rows of the base or of what the adapter brings")
