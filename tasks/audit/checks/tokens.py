"""Tokenizers, special tokens and embeddings: files, ids and rows must agree."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tasks.audit.check import BASE, ERROR, WARNING, Fault, check, either
from tasks.audit.checks.templates import (
    BrokenTemplateError,
    read_template,
    turn_ends,
)
from tasks.audit.known import (
    SETTINGS,
    content,
    embeddings_of,
    of_text,
    plain_tensors,
    template_places,
    text_config,
    token_ids,
    writes_chats,
)
from tasks.audit.scan import differ
from tasks.audit.source import CONFIG, Kind, Source, setting
from tasks.weights.tokens.prove_ids import is_leading, misread_as

TOKENIZER, GENERATION = "tokenizer.json", "generation_config.json"
_MAP = "special_tokens_map.json"
_ROLES = ("eos_token", "bos_token", "pad_token", "unk_token")
_IDS = ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id")


@dataclass(frozen=True)
class Tokens:
    """Token ids of a tokenizer."""

    ids: Mapping[str, int]  # id of every token; of lists without ids, the position
    added: Mapping[str, int]  # ids of added tokens, by text
    special: frozenset[str]  # texts of added tokens that are special
    rows: int  # highest id + 1; 0 without a readable tokenizer.json
    highest_plain: int  # highest id of the vocabulary without added tokens; -1 if there is none


def tokens_of(source: Source) -> Tokens:
    """Read the tokenizer.json of a source."""
    document = source.config(TOKENIZER)
    vocabulary = _model(document).get("vocab")
    plain: dict[str, int] = {}
    if isinstance(vocabulary, list):  # pieces and scores
        pieces = enumerate(vocabulary)
        plain = {str(entry[0]): n for n, entry in pieces if isinstance(entry, list) and entry}
    elif isinstance(vocabulary, Mapping):
        plain = {text: number for text, number in vocabulary.items() if type(number) is int}
    entries = document.get("added_tokens")
    tokens = [
        token
        for token in (entries if isinstance(entries, list) else ())
        if isinstance(token, Mapping) and type(token.get("id")) is int and "content" in token
    ]
    added = {str(token["content"]): token["id"] for token in tokens}
    special = frozenset(str(t["content"]) for t in tokens if t.get("special") is True)
    highest = max(plain.values(), default=-1)
    is_unknown = bool(vocabulary) and not plain  # another kind of vocabulary
    rows = 0 if is_unknown else max((highest, *added.values()), default=-1) + 1
    return Tokens({**plain, **added}, added, special, rows, highest)


def _model(document: Mapping[str, Any]) -> Mapping[str, Any]:
    model = document.get("model")
    return model if isinstance(model, Mapping) else {}


def writes_text(source: Source) -> bool:
    """Return True for a model that writes text."""
    return source.kind in (Kind.MODEL, Kind.VALUE)


_OWN_ROWS = ("mllama", "mllama_text_model", "moshi")
"""Families whose input embedding has rows outside the vocabulary."""


def has_embedding(source: Source) -> bool:
    """Return True for a whole model whose input embedding is known."""
    if not (source.is_model and source.weights.is_whole):
        return False
    tensors = source.once(plain_tensors)
    embeddings = embeddings_of(tensors, source.config())
    own = text_config(source.config()).get("model_type") in _OWN_ROWS
    return bool(embeddings.input) and 0 not in tensors[embeddings.input].shape and not own


@check(
    "TIED_HEAD_ON_DISK", ERROR, needs=(has_embedding,),
    why="loaders use the input embedding in its place: the model repeats one token",
    fix=setting(CONFIG, tie_word_embeddings=False),
    issues="LLaMA-Factory #2789, vLLM #3323, vLLM PR #6758",
)  # fmt: skip
def tied_head(source: Source) -> Iterator[Fault]:
    """An output embedding that differs from the input embedding although config.json ties them."""
    tensors = source.once(plain_tensors)
    embeddings = embeddings_of(tensors, source.config())
    if not embeddings.output or not embeddings.tied:
        return
    head, embedding = tensors[embeddings.output], tensors[embeddings.input]
    differs = head.shape != embedding.shape
    if not differs and (source.is_read or source.alone) and head.extents and embedding.extents:
        keys = {tensor: key for key, tensor in source.tensors.items()}
        differs = head.dtype != embedding.dtype or differ(
            (source, keys[head]), (source, keys[embedding])
        )
    if differs:
        text, expected = "other values than the input embedding", "tie_word_embeddings false"
        yield Fault(text, expected, tensors=[embeddings.output])


def _rows(source: Source) -> int:
    """Return the number of rows of the input embedding; 0 for none."""
    tensors = source.once(plain_tensors)
    name = embeddings_of(tensors, source.config()).input
    return tensors[name].shape[0] if name else 0


_WHOLE_EMBEDDING = re.compile(r"\.(embed_tokens|lm_head)\.((token_adapter\.)?base_layer\.)?weight$")


@check(
    "TOKENIZER_ROWS", ERROR, needs=(either,),
    why="such a token indexes past the embedding: an IndexError, a dead GPU process, garbage",
    fix="resize the embedding to the tokenizer, or serve the base's tokenizer",
    issues="OpenRLHF #87, OpenRLHF PR #163",
)  # fmt: skip
def tokenizer_rows(source: Source) -> Iterator[Fault]:
    """Tokens without a row in the embedding; a warning for special ones that nothing uses."""
    rows, tokens = 0, source.once(tokens_of)
    if source.is_adapter:
        stored = [t.shape for key, t in source.tensors.items() if _WHOLE_EMBEDDING.search(key)]
        rows = max((shape[0] for shape in stored if len(shape) == 2), default=0)
        if not rows and source.base is not None and source.base.is_model:
            rows = _rows(source.base)
    elif has_embedding(source):
        rows = _rows(source)
    if not rows or tokens.rows <= rows:
        return
    beyond = {text for text, number in tokens.added.items() if number >= rows}
    used = {content(source.config(SETTINGS).get(role)) for role in _ROLES} & beyond
    # Some published models have special tokens for images, which they do not process.
    needed = used or tokens.highest_plain >= rows or not beyond <= tokens.special
    text, expected = f"{tokens.rows} ids", f"at most {rows}, the rows of the embedding"
    severity = None if needed else WARNING
    yield Fault(text, expected, TOKENIZER, sorted(used or beyond), severity=severity)


_ABSENT = (
    "generation runs to its length limit, or batches are refused without padding",
    "copy tokenizer_config.json from the trained model; set eos_token_id, pad_token_id",
)
"""Reason and fix for special tokens that no file names."""


@check(
    "TOKEN_UNKNOWN", ERROR, needs=(either,),
    why="loaders add it beyond the embedding or split it into pieces: it is never generated",
    fix="use a token of tokenizer.json, or add it and resize the embedding",
    issues="OpenRLHF #87, OpenRLHF #645, OpenRLHF PR #648, OpenRLHF #1069",
)  # fmt: skip
def token_unknown(source: Source) -> Iterator[Fault]:
    """A special token or a marker of the template that is no token or absent, or a wrong id."""
    settings, mapped = source.config(SETTINGS), source.config(_MAP)
    has_role = any(content(each.get(role)) for each in (settings, mapped) for role in _ROLES)
    # Old tokenizers get theirs from their class, and no file names any: nothing was dropped.
    if not has_role and (_MAP in source.folder.files or "eos_token" in settings):
        yield Fault(
            "no eos, bos or pad token", "at least eos_token", SETTINGS, (), WARNING, *_ABSENT
        )
    if source.kind is Kind.REWARD and not token_ids(of_text(source.config(), "pad_token_id")):
        yield Fault("no pad_token_id", "the tokenizer's", CONFIG, (), WARNING, *_ABSENT)
    tokens, rows = source.once(tokens_of), _rows(source) if source.is_model else 0
    for role in _ROLES:
        token = content(source.config(SETTINGS).get(role))
        if token and tokens.rows and token not in tokens.ids:
            yield Fault(f"{role} {token!r}", f"a token of {TOKENIZER}", file=SETTINGS)
    for file in (CONFIG, GENERATION) if rows else ():
        for name in _IDS:
            beyond = [n for n in token_ids(of_text(source.config(file), name)) if n >= rows]
            if beyond:
                expected = f"below {rows}, the embedding's rows"
                yield Fault(f"{name} {beyond[0]}", expected, file=file)
    places = source.once(template_places) if tokens.rows and writes_chats(source) else {}
    for place, text in places.items():
        try:
            unknown = read_template(text, tokens.special).markers - tokens.ids.keys()
        except BrokenTemplateError:
            continue  # TEMPLATES_DIFFER
        if unknown:
            yield Fault("not tokens of the tokenizer", "tokens", place, sorted(unknown), WARNING)


@check(
    "EOS_DISAGREES", ERROR, needs=(writes_text,),
    why="generation does not stop where training ended: it runs on and talks to itself",
    fix="add the ids to eos_token_id of generation_config.json",
    issues="LLaMA-Factory PR #10834, LLaMA-Factory #9338, LLaMA-Factory #2075",
)  # fmt: skip
def eos_disagrees(source: Source) -> Iterator[Fault]:
    """Generation stops nowhere, or at other tokens than the tokenizer, template or base says."""
    tokens, base = source.once(tokens_of), source.base
    eos = tokens.ids.get(content(source.config(SETTINGS).get("eos_token")))
    turns = turn_ends(source, tokens.ids, tokens.special, eos)
    generation = token_ids(source.config(GENERATION).get("eos_token_id"))
    config = token_ids(of_text(source.config(), "eos_token_id"))
    stops = generation or config
    unstopped = eos is not None and eos not in stops
    reasons = [f"the tokenizer ends with {eos}"] if unstopped else []
    if turns and not {*stops} & {*turns}:
        reasons.append(f"turns of the chat template end with {_listed(turns)}")
    if generation and config and not {*generation} & {*config}:
        reasons.append(f"{CONFIG} stops at {_listed(config)}")
    of_base = token_ids(of_text(base.config(), "eos_token_id")) if base and base.is_model else ()
    if config and of_base and not {*config} & {*of_base}:
        reasons.append(f"the base stops at {_listed(of_base)}")
    if reasons or not stops:
        wanted = list(dict.fromkeys((*token_ids(eos), *turns, *generation, *config)))
        text = "; ".join([f"stops at {_listed(stops)}", *reasons])
        fix = setting(GENERATION, eos_token_id=wanted[0] if len(wanted) == 1 else wanted)
        severity = None if unstopped and stops else WARNING
        file = GENERATION if generation else CONFIG
        expected = f"{_listed(wanted)} among them" if wanted else "the id that ends a response"
        fix = fix if wanted else "set eos_token_id to the id with which training ended responses"
        yield Fault(text, expected, file, severity=severity, fix=fix)


def _listed(ids: Iterable[int]) -> str:
    return ", ".join(map(str, ids)) or "nothing"


_READER = "TokenizersBackend"
_NO_CLASS = (
    "no class helps: transformers 5 builds the tokenizer of every {!r} itself; serve it with "
    "transformers 4, or save the tokenizer again with the transformers of the training"
)
GENERIC_TOKENIZER = "PreTrainedTokenizerFast"


def is_not_loaded(source: Source) -> bool:
    """Return True unless a delivery asks transformers itself how it reads the tokenizer."""
    return not source.alone or find_spec("transformers") is None


@check(
    "TOKENIZER_MISREAD", ERROR, needs=(either, is_not_loaded),
    why="transformers 5 and vLLM rebuild this class: texts become other ids than in training",
    fix="name the class that reads the file as it is, "
    + setting(SETTINGS, tokenizer_class=GENERIC_TOKENIZER),
    issues="transformers #45488, transformers #48206, vLLM PR #48482",
)  # fmt: skip
def tokenizer_misread(source: Source) -> Iterator[Fault]:
    """A tokenizer class that reads tokenizer.json wrongly."""
    config = source.config() or (source.base.config() if source.base is not None else {})
    built, document = _built(source, config), source.config(TOKENIZER)
    if not built or not document or _parts(document) == _parts(built):
        return
    reason, severity = "its steps are not the class's", WARNING
    if find_spec("tokenizers") is not None:
        reason = misread_as(source.root, built)
        severity = WARNING if is_leading(reason) else ERROR  # prompts may have the same ids
    if reason:
        kind, name = config.get("model_type"), str(source.config(SETTINGS).get("tokenizer_class"))
        text, expected = f"tokenizer_class {name!r}: {reason}", f"{GENERIC_TOKENIZER!r}"
        fix = _NO_CLASS.format(kind) if kind in _table()["not_of_config"] else ""
        yield Fault(text, expected, file=SETTINGS, severity=severity, fix=fix)


def _built(source: Source, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the pipeline that transformers 5 builds; None if it reads the file.

    `tests/audit/test_known.py` makes the table from the installed library.
    """
    table, settings = _table(), source.config(SETTINGS)
    if "auto_map" in settings:
        return None  # code of the model
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    name = named.removesuffix("Fast") if isinstance(named, str) else ""
    # The class that AutoTokenizer takes, by the rules of transformers 5
    kind = str(config.get("model_type", ""))
    registered = table["registered"].get(kind, "")
    if registered == _READER or not name or (registered and kind in table["not_of_config"]):
        name = registered or name
    variants = table["built"].get(table["classes"].get(name, ""))
    if variants is None:
        return None
    parameters = {key for variant in variants if variant for key in json.loads(variant)}
    chosen = {key: settings[key] for key in sorted(parameters) if type(settings.get(key)) is bool}
    number = variants.get(json.dumps(chosen, sort_keys=True) if chosen else "", variants[""])
    pipeline: Mapping[str, Any] = table["pipelines"][number]
    return pipeline


@cache
def _table() -> dict[str, Any]:
    path = Path(__file__).parents[1] / "known_tokenizers.json"
    table: dict[str, Any] = json.loads(path.read_text())
    return table


def _parts(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the ids besides the vocabulary, in one form."""
    options = {k: v for k, v in _model(document).items() if k not in ("vocab", "merges")}
    if options.get("byte_fallback"):
        options.pop("unk_token", None)  # every character has bytes
    steps = {name: _plain(document.get(name)) for name in ("normalizer", "pre_tokenizer")}
    return {**steps, "model": _plain(options)}


def _plain(step: Any) -> Any:
    if isinstance(step, list):
        return [_plain(part) for part in step]
    if not isinstance(step, Mapping):
        return step
    full = {"use_regex": True, **step} if step.get("type") == "ByteLevel" else step
    dropped = ("trim_offsets", "precompiled_charsmap")
    return {
        k: _plain(v) for k, v in full.items() if v not in (None, False, "") and k not in dropped
    }


@check(
    "TOKENIZER_NOT_OF_BASE", ERROR, needs=(either, BASE),
    why="the embedding was trained for the base's ids: texts become others, unknown to it",
    fix="copy tokenizer.json of the base with the added tokens, or give the right base",
    issues="transformers #45488",
)  # fmt: skip
def tokenizer_not_of_base(source: Source) -> Iterator[Fault]:
    """A tokenizer that splits or numbers texts otherwise than the base's; tokens may be added."""
    base = source.known_base
    if source.once(tokens_of).rows and base.once(tokens_of).rows:  # else no loader takes it
        changed = list(_changes(source, base))
        if changed:
            yield Fault("; ".join(changed), "as the base has; tokens may be added", file=TOKENIZER)


def _changes(source: Source, base: Source) -> Iterator[str]:
    ours, theirs = source.config(TOKENIZER), base.config(TOKENIZER)
    ids, base_ids = source.once(tokens_of).ids, base.once(tokens_of).ids
    moved = [text for text, number in base_ids.items() if ids.get(text) != number]
    if moved:
        example = f"{moved[0]!r} {ids.get(moved[0])}, not {base_ids[moved[0]]}"
        yield f"{len(moved)} tokens have other ids or none, e.g. {example}"
    merges, base_merges = _merges(ours), _merges(theirs)
    if merges != base_merges:
        yield f"{len(merges)} merges, not the base's {len(base_merges)}"
    if not moved and _parts(ours) != _parts(theirs):
        # Versions write the same steps in other ways: only other ids are a change.
        steps = {name: theirs.get(name) for name in ("normalizer", "pre_tokenizer")}
        options = {k: v for k, v in _model(theirs).items() if k not in ("vocab", "merges")}
        reason = misread_as(source.root, {**steps, "model": options})
        if reason and not is_leading(reason):
            yield f"other steps, by the base's {reason}"
    if _kinds(ours.get("decoder")) != _kinds(theirs.get("decoder")):
        yield "another decoder"


def _kinds(step: Any) -> list[str]:
    """Return the kinds of a decoder's steps."""
    parts = step.get("decoders", [step]) if isinstance(step, Mapping) else []
    parts = parts if isinstance(parts, list) else []
    return [str(part.get("type")) for part in parts if isinstance(part, Mapping)]


def _merges(document: Mapping[str, Any]) -> list[str]:
    """Return the merges as text; tokenizers wrote texts first, and writes pairs since 0.20."""
    merges = _model(document).get("merges")
    pairs = merges if isinstance(merges, list) else []
    return [" ".join(map(str, pair)) if isinstance(pair, list) else str(pair) for pair in pairs]


@check(
    "TOKENIZER_CUTS", WARNING, needs=(either,),
    why="left by a trainer: programs that read tokenizer.json directly cut or pad every prompt",
    fix=setting(TOKENIZER, truncation=None, padding=None),
    issues="djl PR #2741",
)  # fmt: skip
def tokenizer_cuts(source: Source) -> Iterator[Fault]:
    """Truncation or padding in tokenizer.json."""
    document = source.config(TOKENIZER)
    left = [name for name in ("truncation", "padding") if isinstance(document.get(name), Mapping)]
    if left:
        yield Fault(" and ".join(left), "null", file=TOKENIZER)
