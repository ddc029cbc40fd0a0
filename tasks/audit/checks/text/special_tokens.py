"""Check special tokens: the EOS in every file, and token ids against the embedding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tasks.audit.catalogue.text import SpecialTokens
from tasks.audit.checks.text.embeddings import embeddings_of
from tasks.audit.checks.text.template_text import EOS, BrokenTemplateError, read_template
from tasks.audit.checks.text.templates import template_places
from tasks.audit.checks.text.tokens import SETTINGS, TOKENIZER, TOKENIZERS, Tokens, read_tokens
from tasks.audit.config_fields import content, of_text, token_ids, whole
from tasks.audit.finding import Finding
from tasks.audit.recognise import CONFIG, Kind
from tasks.audit.source import Source

GENERATION = "generation_config.json"
_MAP = "special_tokens_map.json"
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
_IDS = ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id")


def check(source: Source) -> Iterator[Finding]:
    """Check the tokenizer, then the configurations against it."""
    if not (source.is_model or source.is_adapter):
        return
    tokens = read_tokens(source.folder)
    yield from _tokenizer(source, tokens)
    if not source.is_model:
        return
    yield from _range(source)
    if source.kind in (Kind.MODEL, Kind.VALUE):
        yield from _ends(source, tokens)
    elif whole(of_text(source.config(), "pad_token_id")) is None:
        yield SpecialTokens.PAD_MISSING.at(
            CONFIG, found="no pad_token_id", expected="the tokenizer's"
        )


def _tokenizer(source: Source, tokens: Tokens) -> Iterator[Finding]:
    files = source.folder.files
    if source.is_model and not any(name in files for name in TOKENIZERS):
        yield SpecialTokens.TOKENIZER_MISSING.at(
            "", found="none", expected=" or ".join(TOKENIZERS[:2])
        )
    settings, mapped = source.config(SETTINGS), source.config(_MAP)
    for role in _ROLES:
        token = content(settings.get(role))
        if token and tokens.rows and not tokens.has(token):
            yield SpecialTokens.TOKEN_UNKNOWN.at(
                SETTINGS, found=f"{role} {token!r}", expected=f"a token of {TOKENIZER}"
            )
    has_role = any(
        content(settings_file.get(role)) for settings_file in (settings, mapped) for role in _ROLES
    )
    # Old tokenizers get theirs from their class, and no file names any: nothing was dropped.
    if not has_role and (_MAP in files or "eos_token" in settings):
        yield SpecialTokens.SPECIAL_TOKENS_EMPTY.at(
            _MAP if _MAP in files else SETTINGS, found="no eos, bos or pad token",
            expected="at least eos_token",
        )  # fmt: skip


def _range(source: Source) -> Iterator[Finding]:
    embedding = embeddings_of(source.tensors, source.config()).input
    rows = source.tensors[embedding].shape[0] if embedding else 0
    if not rows:
        return
    for file in (CONFIG, GENERATION):
        for name in _IDS:
            beyond = [
                number for number in token_ids(of_text(source.config(file), name)) if number >= rows
            ]
            if beyond:
                yield SpecialTokens.TOKEN_ID_RANGE.at(
                    file,
                    found=f"{name} {beyond[0]}",
                    expected=f"below {rows}, the embedding's rows",
                )


def _ends(source: Source, tokens: Tokens) -> Iterator[Finding]:
    config, generation = source.config(), source.config(GENERATION)
    in_config = token_ids(of_text(config, "eos_token_id"))
    in_generation = token_ids(generation.get("eos_token_id"))
    if GENERATION not in source.folder.files and GENERATION not in source.folder.wrong:
        yield SpecialTokens.GENERATION_CONFIG_MISSING.at(
            "", found="no such file", expected=GENERATION
        )
    stops = in_generation or in_config
    token = content(source.config(SETTINGS).get("eos_token"))
    eos = tokens.id_of(token) if token else None
    where = GENERATION if in_generation else CONFIG
    if not stops:
        present = "none in any file" if eos is None else f"only the tokenizer's, {eos}"
        yield SpecialTokens.EOS_MISSING.at(
            where, found=present, expected=f"eos_token_id in {GENERATION}"
        )
        return
    if eos is not None and eos not in stops:
        yield SpecialTokens.EOS_DISAGREES.at(
            where, found=f"stops at {_listed(stops)}; the tokenizer ends with {token!r}, {eos}",
            expected=f"{eos} among them",
        )  # fmt: skip
    if in_generation and in_config and not set(in_generation) & set(in_config):
        yield SpecialTokens.EOS_CONFIGS_DIFFER.at(
            GENERATION, found=f"{_listed(in_generation)}, in {CONFIG} {_listed(in_config)}",
            expected="the same",
        )  # fmt: skip
    yield from _turns(source, tokens, stops, eos)


def _turns(
    source: Source, tokens: Tokens, stops: tuple[int, ...], eos: int | None
) -> Iterator[Finding]:
    """Check that the token with which the chat template ends a message stops generation."""
    for place, text in template_places(source).items():
        try:
            ends = read_template(text, tokens.special).ends
        except BrokenTemplateError:
            return  # `templates` reports it
        ids = {end: eos if end == EOS else tokens.id_of(end) for end in ends}
        if ids and not set(ids.values()) & {*stops}:
            template_ids = [number for number in ids.values() if number is not None]
            yield SpecialTokens.EOS_NOT_TEMPLATE_END.at(
                place, sorted(ends), found=f"ends turns; generation stops at {_listed(stops)}",
                expected=f"its id, {_listed(template_ids)}, in "
                f"eos_token_id of {GENERATION}",
            )  # fmt: skip
        return


def _listed(ids: Iterable[int]) -> str:
    return ", ".join(map(str, ids)) or "nothing"
