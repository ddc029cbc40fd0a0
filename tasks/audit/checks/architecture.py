"""Compare the class in config.json with model_type and with the tensor names.

`headers` compares known families with their contracts. This module finds wrong layouts: keys of a
multimodal model under a text class, prefixes that are missing or doubled, layers that config.json
does not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from tasks.audit.catalogue.model import Architecture
from tasks.audit.config_fields import (
    first_architecture,
    is_multimodal,
    is_plain_text,
    of_text,
    text_config,
    whole,
)
from tasks.audit.finding import Finding
from tasks.audit.known import known
from tasks.audit.recognise import CONFIG, Kind
from tasks.audit.source import Source

_TOWER = re.compile(
    r"(^|\.)(visual|vision_tower|vision_model|vision_encoder|image_tower|video_tower|audio_tower|"
    r"multi_modal_projector)\."
)
_WRAPPED = re.compile(r"^(model\.)?language_model\.")
_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForSequenceClassification")
_TEXT_HEADS = ("ForCausalLM", "LMHeadModel")
_TEXT_KEYS = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
_BARE = ("layers.", "embed_tokens.", "norm.")
_LAYER = re.compile(r"^(?P<at>(?:.*\.)?(?:layers|h|blocks))\.(?P<number>\d{1,6})\.")
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers")
_MTP = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
_DOUBLED = "model.model."


def check(source: Source) -> Iterator[Finding]:
    """Check class names, then key layouts, then layer numbers."""
    if not source.is_model or not source.config():
        return
    yield from _names(source)
    if source.weights.is_whole and source.tensors and source.kind is not Kind.VALUE:
        yield from _layout(source)
        yield from _layers(source)


def _names(source: Source) -> Iterator[Finding]:
    config, name = source.config(), first_architecture(source.config())
    kind = config.get("model_type")
    if not name:
        names = repr(config.get("architectures"))
        yield Architecture.ARCHITECTURE_ABSENT.at(CONFIG, found=names, expected="the model's class")
        return
    of_class = known().kinds_of(name)
    if of_class and isinstance(kind, str) and kind in known().kinds and kind not in of_class:
        yield Architecture.ARCHITECTURE_MODEL_TYPE.at(
            CONFIG, found=f"{name} with model_type {kind!r}",
            expected=f"model_type {' or '.join(sorted(of_class))}",
        )  # fmt: skip


def _layout(source: Source) -> Iterator[Finding]:
    config, keys = source.config(), source.tensors
    name = first_architecture(config)
    if name not in known().classes:
        return  # remote code may use any keys
    towers = [key for key in keys if _TOWER.search(key)]
    wrapped = [key for key in keys if _WRAPPED.match(key)]
    if name.endswith(_TEXT_HEADS) and is_plain_text(config) and (towers or wrapped):
        yield _keys_of(source, towers or wrapped, "keys of a multimodal model", f"those of {name}")
    elif is_multimodal(config) and name.endswith("ForConditionalGeneration"):
        if all(key.startswith(_TEXT_KEYS) for key in keys):
            text = f"those of {name}: a language model within it, and its tower"
            yield _keys_of(source, keys, "keys of a language model alone", text)
        yield from _levels(source, wrapped, name)
    doubled = [key for key in keys if key.startswith(_DOUBLED)]
    if doubled:
        yield _keys_of(source, doubled, "a prefix twice", "model. once")
    bare = [key for key in keys if key.startswith(_BARE)]
    # Some multimodal families store the language model's keys without a prefix.
    plain = name.endswith(_HEADS) and not is_multimodal(config)
    if plain and bare and not any(key.startswith("model.") for key in keys):
        yield _keys_of(source, bare, "keys of a bare backbone", "the same behind model.")


def _levels(source: Source, wrapped: list[str], name: str) -> Iterator[Finding]:
    """Report `language_model.layers` without `model.`, and two layouts in one checkpoint."""
    short = [key for key in wrapped if key.removeprefix("language_model.").startswith(_BARE)]
    if short:
        text = f"those of {name}: language_model.model. or model.language_model."
        yield _keys_of(source, short, "language_model. without model.", text)
    outer = {key.partition("language_model.")[0] for key in wrapped}
    if len(outer) > 1:
        yield _keys_of(source, wrapped, "two layouts of one model", "one")


def _keys_of(source: Source, keys: Iterable[str], actual: str, expected: str) -> Finding:
    names = list(keys)
    file = source.tensors[names[0]].file
    return Architecture.ARCHITECTURE_KEYS.at(file, names, found=actual, expected=expected)


def _layers(source: Source) -> Iterator[Finding]:
    config = source.config()
    counts = [count for name in _COUNTS if (count := whole(of_text(config, name)))]
    lists = _layer_lists(source.tensors)
    text = text_config(config)
    promised = next((n for name in _MTP if (n := whole(text.get(name))) and n > 0), 0)
    odd = config.get("is_encoder_decoder") or first_architecture(config) not in known().classes
    if not lists or not counts or odd:
        return
    # Some families count halves or stacks of layers, under these or other names.
    counted = {value for name, value in text.items() if "layer" in name and whole(value)}
    full = (
        layers
        for layers in lists.values()
        if len(layers) in counted and max(layers) == len(layers) - 1
    )
    numbers = next(full, lists[min(lists, key=lambda at: (at.count("."), at))])
    count = len(numbers) if len(numbers) in counted and max(numbers) < len(numbers) else counts[0]
    surplus = sorted(number for number in numbers if number >= count + promised)
    lacking = [number for number in range(min(count, max(numbers) + 1000)) if number not in numbers]
    if surplus or lacking:
        yield Architecture.ARCHITECTURE_LAYERS.at(
            "", [f"layer {number}" for number in surplus or lacking],
            found=f"{len(numbers)} layers, up to {max(numbers)}",
            expected=f"{count}, as config.json says",
        )  # fmt: skip
    has_mtp = any(
        key.startswith(("mtp.", "model.mtp.")) or ".mtp." in key for key in source.tensors
    )
    if promised and not has_mtp and not any(number >= count for number in numbers):
        yield Architecture.MTP_MISSING.at(
            CONFIG,
            found=f"{promised} in config.json, none in the files",
            expected="their tensors, or 0",
        )


def _layer_lists(keys: Iterable[str]) -> dict[str, set[int]]:
    """Return layer numbers by the name of their list, without those of towers."""
    lists: dict[str, set[int]] = {}
    for key in keys:
        match = _LAYER.match(key)
        if match and not _TOWER.search(key) and "mtp" not in match["at"]:
            lists.setdefault(match["at"], set()).add(int(match["number"]))
    return lists
