"""The record of the trained model (`plumbline.witness`) beside the files of a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.audit.check import ERROR, INFO, WARNING, Fault, Severity, check, some
from tasks.audit.checks.tokens import GENERATION, TOKENIZER
from tasks.audit.known import SETTINGS, of_text, template_places
from tasks.audit.source import ADAPTER_CONFIG, CONFIG, Source
from tasks.core.errors import ArtifactError
from tasks.core.terminal import command
from tasks.drift.witness import active_adapter, find_witness, part
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
    "WITNESS", WARNING,
    why="loaders accept it silently: another scale, other tokens, another EOS or base",
    fix="copy the checkpoint again, and give the base that the record names: {merge}",
    issues="vLLM #55545, trl #6361, ms-swift #9168, verl #7198, ms-swift #861",
)  # fmt: skip
def witness(source: Source) -> Iterator[Fault]:
    """Files or a base that are not those of the recorded training; an info on those that are."""
    if FILE not in source.folder.files:
        return
    facts = source.folder.json(FILE)
    try:
        record, problem = find_witness(source.root), ""
        if not isinstance(facts.get("probes"), list):
            problem = "no probes"
    except ArtifactError as error:
        record, problem = None, error.message
    if problem or record is None:
        fix = "copy the folder plumbline.witness again, or remove it; deliver refuses it"
        yield Fault(problem, "a record that can be read", file=FILE, fix=fix)
        return
    tokens = part(facts, "tokens")
    equal = list[str]()
    for name, file, values, recorded, severity in (
        ("the adapter's settings", ADAPTER_CONFIG,
         *_settings(source.config(ADAPTER_CONFIG), active_adapter(facts), _OF_ADAPTER), ERROR),
        ("EOS and generation settings", GENERATION,
         *_settings(source.config(GENERATION), part(tokens, "generation_config"), _OF_GENERATION),
         None),
        *_tokens(source, part(tokens, "tokenizer")),
        *_base(source, facts),
    ):  # fmt: skip
        if values != recorded:
            yield Fault(values, recorded, file=file, severity=severity)
        elif values:
            equal.append(name)
    longest = facts.get("longest_row")
    for file, name in ((SETTINGS, "model_max_length"), (CONFIG, "max_position_embeddings")):
        limit = of_text(source.config(file), name)
        if not isinstance(longest, int) or not isinstance(limit, int | float):
            continue
        if 0 < limit < min(longest, _NO_LIMIT):
            yield Fault(f"{name} {limit}", f"{longest} or more, the longest row", file=file)
    text = f"{record.line()}; agree with it: {', '.join(equal) or 'no file'}"
    why = "the trainer's process wrote it: it proves what was trained, not what is in the weights"
    fix = f"compare the weights: deliver; or a server: {command('verify')} url=<its address>"
    yield Fault(text, "a record in every checkpoint of a training", FILE, (), INFO, why, fix)


_Compared = tuple[str, str, str, str, Severity | None]
"""Name, file, value in the file, recorded value (both "" if unknown), severity of a difference."""


def _settings(
    saved: Mapping[str, Any], recorded: Mapping[str, Any], keys: tuple[str, ...]
) -> tuple[str, str]:
    """Return the settings that differ, as saved and as recorded; the same text if none does."""
    if not saved or not recorded:
        return "", ""
    differ = [key for key in keys if _plain(saved.get(key)) != _plain(recorded.get(key))]
    if not differ:
        return "as recorded", "as recorded"
    ours, theirs = (
        "; ".join(f"{key}: {_short(each.get(key))}" for key in differ) for each in (saved, recorded)
    )
    return ours, theirs


def _plain(value: object) -> object:
    """Return a setting without differences in form: order, a list of one, none or false."""
    if isinstance(value, list):
        return sorted(value, key=str) or None
    return None if value is None or value is False or value == {} else [value]


def _short(value: object) -> str:
    return some(sorted(map(str, value))) if isinstance(value, list) else str(value)


def _tokens(source: Source, recorded: Mapping[str, Any]) -> Iterator[_Compared]:
    """Compare the chat templates, then the tokenizer."""
    digest = recorded.get("chat_template_sha256")
    places = source.once(template_places) if isinstance(digest, str) else {}
    for place, text in places.items():
        raw = source.folder.text(place) or str(source.config(place).get("chat_template"))
        digests = [_sha256(each) for each in (text, f"{text}\n", raw)]
        ours, theirs = f"sha256 {digests[0][:12]}", f"sha256 {str(digest)[:12]}"
        yield "the chat template", place, theirs if digest in digests else ours, theirs, None
    digest, document = recorded.get("backend_sha256"), source.folder.json(TOKENIZER)
    if not isinstance(digest, str) or not document:
        return
    vocabulary, added = part(document, "model").get("vocab"), document.get("added_tokens")
    more = added if isinstance(added, list) else []
    names = {token.get("content") for token in more if isinstance(token, dict)}
    length = recorded.get("length")
    saved = len({*vocabulary, *names}) if isinstance(vocabulary, dict) else length
    # As the library serialises it: as saved, and without padding.
    digests = [
        _sha256(json.dumps({**document, **part}, ensure_ascii=False, separators=(",", ":")))
        for part in ({}, {"truncation": None, "padding": None})
    ]
    # Another version of the library may write the same in another way, but not more tokens.
    if digest in digests:
        yield "the tokenizer", TOKENIZER, "as recorded", "as recorded", None
    elif length != saved:
        yield "the tokenizer", TOKENIZER, f"{saved} tokens", f"{length} tokens", None


def _base(source: Source, facts: Mapping[str, Any]) -> Iterator[_Compared]:
    base = source.base
    if base is None:
        return
    root, recorded = str(base.root), part(facts, "base")
    digest = recorded.get("headers_sha256")
    if isinstance(digest, str) and base.weights.is_whole and not base.weights.is_pickled:
        tensors = {name: [each.dtype, list(each.shape)] for name, each in base.tensors.items()}
        current = _sha256(json.dumps(tensors, sort_keys=True))
        ours, theirs = (f"tensors with sha256 {each[:12]}" for each in (current, digest))
        yield "the base's tensors", root, ours, theirs, None
    method = part(facts, "quantization").get("method")
    stored = part(base.config(), "quantization_config").get("quant_method")
    if source.is_adapter and isinstance(method, str):
        wrong = stored is None if method in _FOUR_BITS else stored is not None and method == "none"
        ours, theirs = (
            "not quantised" if each in (None, "none") else str(each) for each in (stored, method)
        )
        yield "the storage of the base", root, ours if wrong else theirs, theirs, None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
