"""The record of the trained model (`plumbline.witness`) beside the files of a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tasks.audit.check import ERROR, INFO, WARNING, Fault, check, some
from tasks.audit.checks.templates import SETTINGS, template_places
from tasks.audit.checks.tokens import GENERATION, TOKENIZER
from tasks.audit.known import of_text, whole
from tasks.audit.source import ADAPTER_CONFIG, CONFIG, Source
from tasks.core.errors import ArtifactError
from tasks.drift.verdict import NAMES
from tasks.drift.witness import find_witness
from tasks.weights.files.reader import read_header, weight_files
from tasks.witness.plumbline_witness.prints import FOLDER

FILE = f"{FOLDER}/witness.json"
_OF_ADAPTER = (
    "peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "use_dora", "rank_pattern",
    "alpha_pattern", "modules_to_save", "layers_to_transform", "layers_pattern", "bias",
    "fan_in_fan_out", "target_parameters", "exclude_modules",
)  # fmt: skip
"""Settings that change what an adapter computes."""
_OF_GENERATION = (
    "eos_token_id", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample",
    "max_new_tokens",
)  # fmt: skip
_FOUR_BITS = ("nf4", "fp4", "int8")
_NO_LIMIT = 10**9
"""`model_max_length` from which on it stands for "not set"."""


@check(
    "WITNESS_DIFFERS", WARNING,
    why="loaders accept it silently: another scale, other tokens, another EOS or base",
    fix="copy the checkpoint again, and give the base that the record names: {merge}",
    issues="vLLM #55545, trl #6361, ms-swift #9168, verl #7198, ms-swift #861",
)  # fmt: skip
def differs(source: Source) -> Iterator[Fault]:
    """Files or a base that are not those of the recorded training, or an unreadable record."""
    yield from (each for each in source.once(_compared) if isinstance(each, Fault))


@check(
    "WITNESS", INFO,
    why="the trainer's process wrote it: it proves what was trained, not what is in the weights",
    fix="compare the weights: {deliver}; or a server: plumbline verify url=<its address>",
)  # fmt: skip
def agrees(source: Source) -> Iterator[Fault]:
    """A record of the live model, and the files that agree with it."""
    names = ", ".join(each for each in source.once(_compared) if isinstance(each, str))
    if FILE in source.folder.files and not _unreadable(source):
        witness = find_witness(source.folder.root)
        line = witness.line() if witness is not None else ""
        text = f"{line}; agree with it: {names or 'no file that could be compared'}"
        yield Fault(text, "a record in every checkpoint of a training", file=FILE)


def _compared(source: Source) -> list[Fault | str]:
    """Return faults, and the names of what agrees with the record."""
    if FILE not in source.folder.files:
        return []
    if problem := _unreadable(source):
        fix = "copy the folder plumbline.witness again, or remove it; deliver refuses it"
        return [Fault(problem, "a record that can be read", file=FILE, fix=fix)]
    facts = source.folder.json(FILE)
    tokens = _part(facts, "tokens")
    tokenizer, generation = _part(tokens, "tokenizer"), _part(tokens, "generation_config")
    return [
        *_adapter(source, _part(facts, "peft")),
        *_template(source, tokenizer.get("chat_template_sha256")),
        *_tokenizer(source, tokenizer),
        *_settings(source, GENERATION, "EOS and generation settings", _OF_GENERATION, generation),
        *_lengths(source, whole(facts.get("longest_row")) or 0),
        *_base(source, facts),
    ]


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


def _adapter(source: Source, peft: Mapping[str, Any]) -> Iterator[Fault | str]:
    adapters, active = _part(peft, "adapters"), peft.get("active")
    names = [name for name in active if name in adapters] if isinstance(active, list) else []
    name = names[0] if names else next(iter(adapters), "")
    recorded, what = _part(adapters, name), "the adapter's settings"
    yield from _settings(source, ADAPTER_CONFIG, what, _OF_ADAPTER, recorded, ERROR)


def _settings(
    source: Source, file: str, name: str, keys: Sequence[str], recorded: Mapping[str, Any],
    severity: Any = None,
) -> Iterator[Fault | str]:  # fmt: skip
    """Compare settings of a file with those of the record; `name` is what agrees."""
    saved = source.config(file)
    if not saved or not recorded:
        return
    differ = [key for key in keys if _plain(saved.get(key)) != _plain(recorded.get(key))]
    ours, theirs = (
        "; ".join(f"{key}: {_short(each.get(key))}" for key in differ) for each in (saved, recorded)
    )
    yield Fault(ours, theirs, file=file, severity=severity) if differ else name


def _plain(value: object) -> object:
    """Return a setting without differences in form: order, a list of one, none or false."""
    if isinstance(value, list):
        return sorted(value, key=str) or None
    return None if value is None or value is False or value == {} else [value]


def _short(value: object) -> str:
    return some(sorted(map(str, value))) if isinstance(value, list) else str(value)


def _template(source: Source, digest: object) -> Iterator[Fault | str]:
    places = source.once(template_places)
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


def _tokenizer(source: Source, recorded: Mapping[str, Any]) -> Iterator[Fault | str]:
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


def _lengths(source: Source, longest: int) -> Iterator[Fault]:
    """Yield a context that is shorter than a row of the training."""
    for file, name in ((SETTINGS, "model_max_length"), (CONFIG, "max_position_embeddings")):
        limit = of_text(source.config(file), name)
        if isinstance(limit, int | float) and 0 < limit < min(longest, _NO_LIMIT):
            yield Fault(f"{name} {limit}", f"{longest} or more, the longest row", file=file)


def _base(source: Source, facts: Mapping[str, Any]) -> Iterator[Fault | str]:
    base = source.base
    if base is None:
        return
    root, recorded = str(base.folder.root), _part(facts, "base")
    digest, current = recorded.get("headers_sha256"), _headers_digest(base)
    if isinstance(digest, str) and current is not None:
        expected = f"{digest[:12]}, of {recorded.get('name') or 'an unnamed base'}"
        text = f"names, dtypes and shapes with sha256 {current[:12]}"
        yield "the base's tensors" if current == digest else Fault(text, expected, file=root)
    method = _part(facts, "quantization").get("method")
    stored = _part(base.config(), "quantization_config").get("quant_method")
    if source.is_adapter and isinstance(method, str):
        if method in _FOUR_BITS and stored is None:
            yield Fault("not quantised", method, file=root)
        elif method == "none" and stored is not None:
            yield Fault(str(stored), "not quantised", file=root)
        else:
            yield "the storage of the base"


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


def _part(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = document.get(key)
    return part if isinstance(part, Mapping) else {}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
