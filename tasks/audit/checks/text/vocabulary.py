"""Check embeddings, ties and vocabulary: config.json, the tokenizer and the rows must agree."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tasks.audit.catalogue.text import Vocabulary
from tasks.audit.checks.text.embeddings import Embeddings, embeddings_of
from tasks.audit.checks.text.tokens import SETTINGS, TOKENIZER, read_tokens
from tasks.audit.config_fields import content, first_architecture, of_text, text_config, whole
from tasks.audit.finding import Finding, Severity
from tasks.audit.recognise import CONFIG, Kind
from tasks.audit.source import Source

_OWN_ROWS = ("mllama", "mllama_text_model", "moshi")
"""Families whose input embedding has rows outside the vocabulary."""
_WHOLE_EMBEDDING = re.compile(r"\.(embed_tokens|lm_head)\.((token_adapter\.)?base_layer\.)?weight$")
_ROLES = ("eos_token", "bos_token", "pad_token", "unk_token")
_GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def check(source: Source) -> Iterator[Finding]:
    """Check ties, then numbers of rows."""
    if source.is_adapter:
        yield from _adapter_rows(source)
    if not source.is_model or not source.weights.is_whole:
        return
    embeddings = embeddings_of(source.tensors, source.config())
    if not embeddings.input or 0 in source.tensors[embeddings.input].shape:
        return
    if text_config(source.config()).get("model_type") in _OWN_ROWS:
        return
    yield from _ties(source, embeddings)
    yield from _rows(source, embeddings)


def _ties(source: Source, embeddings: Embeddings) -> Iterator[Finding]:
    config = source.config()
    if embeddings.output and embeddings.tied:
        same = source.tensors[embeddings.output].shape == source.tensors[embeddings.input].shape
        yield Vocabulary.TIED_HEAD_ON_DISK.at(
            source.tensors[embeddings.output].file, embeddings.output,
            found="present, and tie_word_embeddings is true",
            expected="no such tensor, or tie_word_embeddings false",
            severity=None if same else Severity.ERROR,
            fix="if TIED_HEAD_DIFFERS follows, set tie_word_embeddings to false; else remove it"
            if source.values else "",
        )  # fmt: skip
    generates = first_architecture(config).endswith(_GENERATES)
    language = source.kind is Kind.MODEL and generates and not config.get("is_encoder_decoder")
    if (
        language
        and not embeddings.output
        and embeddings.tied is False
        and not _other_heads(source, embeddings)
    ):
        yield Vocabulary.HEAD_NOT_ON_DISK.at(
            CONFIG, found="tie_word_embeddings is false, and no lm_head.weight",
            expected="lm_head.weight, or tie_word_embeddings true",
        )  # fmt: skip


def _other_heads(source: Source, embeddings: Embeddings) -> list[str]:
    """Return matrices outside layers with a row for every token, e.g. `head.weight`."""
    rows = source.tensors[embeddings.input].shape[:1]
    return [
        key
        for key, tensor in source.tensors.items()
        if key != embeddings.input and len(tensor.shape) == 2 and tensor.shape[:1] == rows
        and not any(part.isdecimal() for part in key.split("."))
    ]  # fmt: skip


def _rows(source: Source, embeddings: Embeddings) -> Iterator[Finding]:
    embedding = source.tensors[embeddings.input]
    rows, size = embedding.shape[0], whole(of_text(source.config(), "vocab_size"))
    if size is not None and size != rows:
        yield Vocabulary.VOCAB_SIZE.at(
            embedding.file,
            embeddings.input,
            found=f"{rows} rows, vocab_size {size}",
            expected="equal",
        )
    if embeddings.output and source.tensors[embeddings.output].shape[:1] != (rows,):
        head = source.tensors[embeddings.output]
        yield Vocabulary.HEAD_ROWS.at(
            head.file, embeddings.output, found=f"{list(head.shape)}",
            expected=f"{rows} rows, as {embeddings.input} has",
        )  # fmt: skip
    yield from _tokens(source, rows, f"the rows of {embeddings.input}")


def _tokens(source: Source, rows: int, whose: str) -> Iterator[Finding]:
    """Report token ids beyond the rows.

    It is a warning if all of them are special tokens that no setting uses: some published models
    have such tokens, for images that they do not process.
    """
    tokens = read_tokens(source.folder)
    if tokens.rows <= rows:
        return
    beyond = {text for text, number in tokens.added.items() if number >= rows}
    settings = source.config(SETTINGS)
    used = {content(settings.get(role)) for role in _ROLES} & beyond
    plain = tokens.highest_plain >= rows or not beyond <= tokens.special
    yield Vocabulary.TOKENIZER_ROWS.at(
        TOKENIZER, sorted(used or beyond), found=f"{tokens.rows} ids",
        expected=f"at most {rows}, {whose}", severity=None if used or plain else Severity.WARNING,
    )  # fmt: skip


def _adapter_rows(source: Source) -> Iterator[Finding]:
    """Compare full embeddings in an adapter with each other and with its tokenizer."""
    full = {
        key: tensor
        for key, tensor in source.tensors.items()
        if _WHOLE_EMBEDDING.search(key) and len(tensor.shape) == 2
    }
    rows = {tensor.shape[0] for tensor in full.values()} - {0}
    if len(rows) > 1:
        yield Vocabulary.HEAD_ROWS.at(
            next(iter(full.values())).file, list(full),
            found=" and ".join(f"{count} rows" for count in sorted(rows)), expected="equal",
        )  # fmt: skip
    base = source.base
    embeddings = embeddings_of(base.tensors, base.config()) if base and base.is_model else None
    if not rows and base and embeddings and embeddings.input:
        rows = {base.tensors[embeddings.input].shape[0]}
    if rows:
        yield from _tokens(source, max(rows), "the rows of the base or of the adapter")
