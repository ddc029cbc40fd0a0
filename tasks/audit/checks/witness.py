"""Compare a checkpoint's files with the record that its training left, `plumbline.witness`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tasks.audit.catalogue.witness import Records
from tasks.audit.checks.text.templates import template_places
from tasks.audit.finding import Finding, some
from tasks.audit.recognise import ADAPTER_CONFIG
from tasks.audit.source import Source
from tasks.core.errors import ArtifactError
from tasks.drift.verdict import NAMES
from tasks.drift.witness import FOLDER, FORMAT, find_witness
from tasks.weights.files.header import read_header
from tasks.weights.files.index import weight_files

FILE = f"{FOLDER}/witness.json"
GENERATION, TOKENIZER = "generation_config.json", "tokenizer.json"
_ADAPTER = (
    *("peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "use_dora", "rank_pattern"),
    *("alpha_pattern", "modules_to_save", "layers_to_transform", "layers_pattern", "bias"),
    *("fan_in_fan_out", "target_parameters", "exclude_modules"),
)
"""Settings that change what an adapter computes."""
_GENERATION = (
    *("eos_token_id", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("do_sample", "max_new_tokens"),
)
_FOUR_BITS = ("nf4", "fp4", "int8")
Agrees = list[str]


def check(source: Source) -> Iterator[Finding]:
    """Yield what differs from the record, and one line for what the record proves."""
    facts = source.folder.json(FILE)
    if FILE not in source.folder.files:
        return
    problem = _unreadable(source, facts)
    if problem:
        yield Records.WITNESS_UNREADABLE.at(FILE, found=problem, expected=f"format {FORMAT}")
        return
    agrees: Agrees = []
    tokens = _part(facts, "tokens")
    yield from _adapter(source, _part(facts, "peft"), agrees)
    yield from _template(source, _part(tokens, "tokenizer"), agrees)
    yield from _tokenizer(source, _part(tokens, "tokenizer"), agrees)
    yield from _generation(source, _part(tokens, "generation_config"), agrees)
    yield from _base(source, _part(facts, "base"), agrees)
    yield from _quantisation(source, facts, agrees)
    witness = find_witness(source.folder.root)
    line = witness.line() if witness is not None else ""
    yield Records.WITNESS.at(
        FILE,
        found=f"{line}; agree with it: {', '.join(agrees) or 'no file that could be compared'}",
        expected="a record in every checkpoint of a training",
    )


def _unreadable(source: Source, facts: Mapping[str, Any]) -> str:
    """Return why the record cannot be used; "" if it can."""
    if FILE in source.folder.wrong:
        return source.folder.wrong[FILE]
    if not any(f"{FOLDER}/{name}" in source.folder.files for name in NAMES):
        return "no measured file"
    probes = facts.get("probes")
    if not isinstance(probes, list) or not isinstance(facts.get("versions", {}), dict):
        return "no probes"
    try:
        find_witness(source.folder.root)
    except ArtifactError as error:
        return error.message
    return ""


def _part(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = document.get(key)
    return part if isinstance(part, Mapping) else {}


def _adapter(source: Source, peft: Mapping[str, Any], agrees: Agrees) -> Iterator[Finding]:
    adapters = _part(peft, "adapters")
    saved = source.config(ADAPTER_CONFIG)
    if not adapters or not saved:
        return
    active = peft.get("active")
    names = [name for name in active if name in adapters] if isinstance(active, list) else []
    recorded = _part(adapters, names[0] if names else next(iter(adapters)))
    place = (ADAPTER_CONFIG, "the adapter's settings")
    yield from _settings(Records.WITNESS_ADAPTER.at, place, _ADAPTER, saved, recorded, agrees)


def _short(value: object) -> str:
    return some(sorted(map(str, value))) if isinstance(value, list) else str(value)


def _template(source: Source, recorded: Mapping[str, Any], agrees: Agrees) -> Iterator[Finding]:
    digest = recorded.get("chat_template_sha256")
    places = template_places(source)
    if not isinstance(digest, str) or not places:
        return
    for place, text in places.items():
        if digest not in map(_sha256, (text, f"{text}\n", _raw_template(source, place))):
            yield Records.WITNESS_TEMPLATE.at(
                place, found=f"sha256 {_sha256(text)[:12]}", expected=f"sha256 {digest[:12]}"
            )
            return
    agrees.append("the chat template")


def _raw_template(source: Source, place: str) -> str:
    """Return a template with its newlines at both ends."""
    if place.endswith(".jinja"):
        return source.folder.text(place)
    return str(source.config(place).get("chat_template"))


def _tokenizer(source: Source, recorded: Mapping[str, Any], agrees: Agrees) -> Iterator[Finding]:
    digest = recorded.get("backend_sha256")
    document = source.folder.json(TOKENIZER)
    if not isinstance(digest, str) or not document:
        return
    if digest in map(_sha256, _serialised(document)):
        agrees.append("the tokenizer")
        return
    length, saved = recorded.get("length"), _length(document)
    if length == saved or saved is None:
        return  # another version of the library may write the same tokenizer in another way
    yield Records.WITNESS_TOKENIZER.at(
        TOKENIZER, found=f"{saved} tokens", expected=f"{length} tokens"
    )


def _serialised(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a tokenizer as the library serialises it, as saved and without padding."""
    for changes in ({}, {"truncation": None, "padding": None}):
        yield json.dumps({**document, **changes}, ensure_ascii=False, separators=(",", ":"))


def _length(document: Mapping[str, Any]) -> int | None:
    """Return the number of tokens with those that were added; None if it is not known."""
    vocabulary, added = _part(document, "model").get("vocab"), document.get("added_tokens")
    if not isinstance(vocabulary, dict):
        return None
    more = added if isinstance(added, list) else []
    names = {token.get("content") for token in more if isinstance(token, dict)}
    return len(vocabulary.keys() | names)


def _generation(source: Source, recorded: Mapping[str, Any], agrees: Agrees) -> Iterator[Finding]:
    saved = source.config(GENERATION)
    if not recorded or not saved:
        return
    place = (GENERATION, "EOS and generation settings")
    yield from _settings(Records.WITNESS_GENERATION.at, place, _GENERATION, saved, recorded, agrees)


def _settings(
    finding: Callable[..., Finding],
    place: tuple[str, str],
    keys: Sequence[str],
    saved: Mapping[str, Any],
    recorded: Mapping[str, Any],
    agrees: Agrees,
) -> Iterator[Finding]:
    """Yield the settings of a file that are not those of the record; `place` is file and name."""
    differ = [key for key in keys if _plain(saved.get(key)) != _plain(recorded.get(key))]
    if not differ:
        agrees.append(place[1])
        return
    yield finding(
        place[0],
        found="; ".join(f"{key}: {_short(saved.get(key))}" for key in differ),
        expected="; ".join(f"{key}: {_short(recorded.get(key))}" for key in differ),
    )


def _plain(value: object) -> object:
    """Return a setting without differences in form: order, a list of one, none or false."""
    if isinstance(value, list):
        return sorted(value, key=str) or None
    return None if value is None or value is False or value == {} else [value]


def _base(source: Source, recorded: Mapping[str, Any], agrees: Agrees) -> Iterator[Finding]:
    digest = recorded.get("headers_sha256")
    if source.base is None or not isinstance(digest, str):
        return
    current = _headers_digest(source.base)
    if current == digest:
        agrees.append("the base's tensors")
    elif current is not None:
        yield Records.WITNESS_BASE.at(
            str(source.base.folder.root),
            found=f"names, dtypes and shapes with sha256 {current[:12]}",
            expected=f"{digest[:12]}, of {recorded.get('name') or 'an unnamed base'}",
        )


def _headers_digest(base: Source) -> str | None:
    """Return the digest of a base's headers as `plumbline-witness` takes it."""
    tensors: dict[str, Any] = {}
    for path in weight_files(base.folder.root, "*.safetensors"):
        try:
            header = read_header(path)
        except (ArtifactError, OSError):
            return None
        tensors |= {name: [info.dtype, list(info.shape)] for name, info in header.tensors.items()}
    return _sha256(json.dumps(tensors, sort_keys=True)) if tensors else None


def _quantisation(source: Source, facts: Mapping[str, Any], agrees: Agrees) -> Iterator[Finding]:
    base = source.base
    recorded = _part(facts, "quantization").get("method")
    if not source.is_adapter or base is None or not isinstance(recorded, str):
        return
    stored = _part(base.config(), "quantization_config").get("quant_method")
    if recorded in _FOUR_BITS and stored is None:
        yield Records.WITNESS_QUANTISATION.at(
            str(base.folder.root), found="not quantised", expected=recorded
        )
    elif recorded == "none" and stored is not None:
        yield Records.WITNESS_QUANTISATION.at(
            str(base.folder.root), found=str(stored), expected="not quantised",
            fix="give the base that the record names",
        )  # fmt: skip
    else:
        agrees.append("the storage of the base")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
