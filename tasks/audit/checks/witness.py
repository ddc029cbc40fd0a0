"""The record of the trained model (`plumbline.witness`) beside the files of a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tasks.audit.check import ERROR, INFO, WARNING, Fault, check, some
from tasks.audit.checks.templates import template_places
from tasks.audit.repair import TOKENIZER
from tasks.audit.source import ADAPTER_CONFIG, Source
from tasks.core.errors import ArtifactError
from tasks.drift.verdict import NAMES
from tasks.drift.witness import find_witness
from tasks.weights.files.header import read_header
from tasks.weights.files.reader import weight_files
from tasks.witness.plumbline_witness.prints import FOLDER, FORMAT

FILE = f"{FOLDER}/witness.json"
_GENERATION = "generation_config.json"
_OF_ADAPTER = (
    *("peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "use_dora", "rank_pattern"),
    *("alpha_pattern", "modules_to_save", "layers_to_transform", "layers_pattern", "bias"),
    *("fan_in_fan_out", "target_parameters", "exclude_modules"),
)
"""Settings that change what an adapter computes."""
_OF_GENERATION = (
    *("eos_token_id", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("do_sample", "max_new_tokens"),
)
_FOUR_BITS = ("nf4", "fp4", "int8")
_Differs = Iterator[Fault | str]
"""A fault, or the name of what agrees with the record."""


def has_record(source: Source) -> bool:
    """Return True if there is a record that can be read."""
    return FILE in source.folder.files and not source.once(_unreadable)


@check(
    "WITNESS_UNREADABLE", WARNING,
    why="nothing can be compared with it; deliver refuses the checkpoint",
    fix="copy the folder plumbline.witness again, or remove it",
)  # fmt: skip
def unreadable(source: Source) -> Iterator[Fault]:
    """A record that is incomplete or of a newer format."""
    if FILE in source.folder.files and (problem := source.once(_unreadable)):
        yield Fault(problem, f"format {FORMAT}", file=FILE)


def _unreadable(source: Source) -> str:
    """Return why the record cannot be used; "" if it can."""
    facts = source.folder.json(FILE)
    if FILE in source.folder.wrong:
        return source.folder.wrong[FILE]
    if not any(f"{FOLDER}/{name}" in source.folder.files for name in NAMES):
        return "no measured file"
    if not isinstance(facts.get("probes"), list) or not isinstance(facts.get("versions", {}), dict):
        return "no probes"
    try:
        find_witness(source.folder.root)
    except ArtifactError as error:
        return error.message
    return ""


@check(
    "WITNESS_ADAPTER", ERROR, needs=(has_record,),
    why="a changed r, lora_alpha or rsLoRA changes the adapter's scale, changed targets leave "
    "modules out: every loader accepts both silently",
    fix="restore the adapter_config.json of the run that trained it",
    issues="vLLM #55545, vLLM PR #41384",
)  # fmt: skip
def other_adapter(source: Source) -> Iterator[Fault]:
    """Settings in adapter_config.json that are not those of the training."""
    yield from _faults(source.once(_adapter))


def _adapter(source: Source) -> list[Fault | str]:
    peft = _part(source.folder.json(FILE), "peft")
    adapters, active = _part(peft, "adapters"), peft.get("active")
    names = [name for name in active if name in adapters] if isinstance(active, list) else []
    name = names[0] if names else next(iter(adapters), "")
    saved, recorded = source.config(ADAPTER_CONFIG), _part(adapters, name)
    if not adapters or not saved:
        return []
    return _settings(ADAPTER_CONFIG, "the adapter's settings", _OF_ADAPTER, saved, recorded)


@check(
    "WITNESS_FILES", WARNING, needs=(has_record,),
    why="the served model reads other tokens around each message than it was trained on, a text "
    "becomes other tokens, or vLLM samples with another temperature and stops at another EOS",
    fix="copy the checkpoint again from the machine that trained it, with this file",
    issues="trl #6361, ms-swift #9168, verl #7198",
)  # fmt: skip
def other_files(source: Source) -> Iterator[Fault]:
    """A chat template, a tokenizer or generation settings that are not those of the training."""
    yield from _faults(source.once(_files))


def _files(source: Source) -> list[Fault | str]:
    tokens = _part(source.folder.json(FILE), "tokens")
    saved, recorded = source.config(_GENERATION), _part(tokens, "generation_config")
    settings = []
    if saved and recorded:
        name = "EOS and generation settings"
        settings = _settings(_GENERATION, name, _OF_GENERATION, saved, recorded)
    tokenizer = _part(tokens, "tokenizer")
    return [*_template(source, tokenizer), *_tokenizer(source, tokenizer), *settings]


def _template(source: Source, recorded: Mapping[str, Any]) -> _Differs:
    digest, places = recorded.get("chat_template_sha256"), source.once(template_places)
    if not isinstance(digest, str) or not places:
        return
    for place, text in places.items():
        if place.endswith(".jinja"):
            raw = source.folder.text(place)
        else:
            raw = str(source.config(place).get("chat_template"))
        if digest not in map(_sha256, (text, f"{text}\n", raw)):
            yield Fault(f"sha256 {_sha256(text)[:12]}", f"sha256 {digest[:12]}", file=place)
            return
    yield "the chat template"


def _tokenizer(source: Source, recorded: Mapping[str, Any]) -> _Differs:
    digest, document = recorded.get("backend_sha256"), source.folder.json(TOKENIZER)
    if not isinstance(digest, str) or not document:
        return
    # As the library serialises it: as saved, and without padding.
    for changes in ({}, {"truncation": None, "padding": None}):
        text = json.dumps({**document, **changes}, ensure_ascii=False, separators=(",", ":"))
        if _sha256(text) == digest:
            yield "the tokenizer"
            return
    vocabulary, added = _part(document, "model").get("vocab"), document.get("added_tokens")
    if not isinstance(vocabulary, dict):
        return
    more = added if isinstance(added, list) else []
    names = {token.get("content") for token in more if isinstance(token, dict)}
    length, saved = recorded.get("length"), len(vocabulary.keys() | names)
    if length != saved:  # else another version of the library may write the same in another way
        yield Fault(f"{saved} tokens", f"{length} tokens", file=TOKENIZER)


@check(
    "WITNESS_BASE", WARNING, needs=(has_record,),
    why="it is another model, another revision, or the same in another precision: the merged model "
    "is not the one that was trained. An adapter that was trained on 4-bit weights compensates for "
    "their rounding, and is off by that rounding on 16-bit weights",
    fix="give the base that the record names; deliver merges into the dequantized base if the "
    "record says so: {merge}",
)  # fmt: skip
def other_base(source: Source) -> Iterator[Fault]:
    """A base whose tensors, or whose storage, are not those of the training."""
    yield from _faults(source.once(_base))


def _base(source: Source) -> list[Fault | str]:
    base, facts = source.base, source.folder.json(FILE)
    if base is None:
        return []
    root, result = str(base.folder.root), list[Fault | str]()
    recorded = _part(facts, "base")
    digest, current = recorded.get("headers_sha256"), _headers_digest(base)
    if isinstance(digest, str) and current is not None:
        expected = f"{digest[:12]}, of {recorded.get('name') or 'an unnamed base'}"
        text = f"names, dtypes and shapes with sha256 {current[:12]}"
        fault = Fault(text, expected, file=root)
        result.append("the base's tensors" if current == digest else fault)
    method = _part(facts, "quantization").get("method")
    stored = _part(base.config(), "quantization_config").get("quant_method")
    if source.is_adapter and isinstance(method, str):
        if method in _FOUR_BITS and stored is None:
            result.append(Fault("not quantised", method, file=root))
        elif method == "none" and stored is not None:
            result.append(Fault(str(stored), "not quantised", file=root))
        else:
            result.append("the storage of the base")
    return result


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


@check(
    "WITNESS", INFO, needs=(has_record,),
    why="the trainer's own process wrote it. It proves what was trained, not what the weights in "
    "this folder or a server compute: deliver and verify compare these",
    fix="compare the weights: {deliver}; compare a server: plumbline verify url=<its address> with "
    "this folder as source",
)  # fmt: skip
def agrees(source: Source) -> Iterator[Fault]:
    """A record of the live model, and the files that agree with it."""
    results = [*source.once(_adapter), *source.once(_files), *source.once(_base)]
    names = ", ".join(each for each in results if isinstance(each, str))
    witness = find_witness(source.folder.root)
    line = witness.line() if witness is not None else ""
    yield Fault(
        f"{line}; agree with it: {names or 'no file that could be compared'}",
        "a record in every checkpoint of a training",
        file=FILE,
    )


def _faults(results: list[Fault | str]) -> Iterator[Fault]:
    return (each for each in results if isinstance(each, Fault))


def _settings(
    file: str, name: str, keys: Sequence[str], saved: Mapping[str, Any], recorded: Mapping[str, Any]
) -> list[Fault | str]:
    """Compare settings of a file with those of the record; `name` is what agrees."""
    differ = [key for key in keys if _plain(saved.get(key)) != _plain(recorded.get(key))]
    if not differ:
        return [name]
    ours, theirs = (
        "; ".join(f"{key}: {_short(each.get(key))}" for key in differ) for each in (saved, recorded)
    )
    return [Fault(ours, theirs, file=file)]


def _plain(value: object) -> object:
    """Return a setting without differences in form: order, a list of one, none or false."""
    if isinstance(value, list):
        return sorted(value, key=str) or None
    return None if value is None or value is False or value == {} else [value]


def _short(value: object) -> str:
    return some(sorted(map(str, value))) if isinstance(value, list) else str(value)


def _part(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = document.get(key)
    return part if isinstance(part, Mapping) else {}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
