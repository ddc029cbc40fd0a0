"""The class that config.json names, against model_type and the keys of the tensors.

Contracts of known families are judged by `headers`; what is looked for here are layouts: keys of a
multimodal model under a text class, prefixes that a wrapper left out or put twice, layers that
config.json does not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tasks.audit.catalogue import architecture as say
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
    """Names, then layouts, then layers."""
    if not source.is_model:
        return
    config = source.config()
    if not config:
        return
    yield from _names(source)
    if source.weights.is_whole and source.tensors and source.kind is not Kind.VALUE:
        yield from _layout(source)
        yield from _layers(source)


def _names(source: Source) -> Iterator[Finding]:
    config, name = source.config(), first_architecture(source.config())
    kind = config.get("model_type")
    if not name:
        found = repr(config.get("architectures"))
        yield say.ARCHITECTURE_ABSENT.at(CONFIG, found=found, expected="the model's class")
        return
    of_class = known().kinds_of(name)
    if of_class and isinstance(kind, str) and kind in known().kinds and kind not in of_class:
        yield say.ARCHITECTURE_MODEL_TYPE.at(
            CONFIG, found=f"{name} with model_type {kind!r}",
            expected=f"model_type {' or '.join(sorted(of_class))}",
        )  # fmt: skip


def _layout(source: Source) -> Iterator[Finding]:
    config, keys = source.config(), source.tensors
    name = first_architecture(config)
    if name not in known().classes:
        return  # classes with code of their own have keys of their own
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
    # Of some multimodal families the language model's keys have no prefix on disk.
    plain = name.endswith(_HEADS) and not is_multimodal(config)
    if plain and bare and not any(key.startswith("model.") for key in keys):
        yield _keys_of(source, bare, "keys of a bare backbone", "the same behind model.")


def _levels(source: Source, wrapped: list[str], name: str) -> Iterator[Finding]:
    """`language_model.layers`, a level short; or two layouts in one checkpoint."""
    short = [key for key in wrapped if key.removeprefix("language_model.").startswith(_BARE)]
    if short:
        text = f"those of {name}: language_model.model. or model.language_model."
        yield _keys_of(source, short, "language_model. without model.", text)
    outer = {key.partition("language_model.")[0] for key in wrapped}
    if len(outer) > 1:
        yield _keys_of(source, wrapped, "two layouts of one model", "one")


def _keys_of(source: Source, keys: Iterable[str], found: str, expected: str) -> Finding:
    names = list(keys)
    file = source.tensors[names[0]].file
    return say.ARCHITECTURE_KEYS.at(file, names, found=found, expected=expected)


def _layers(source: Source) -> Iterator[Finding]:
    config = source.config()
    counts = [one for name in _COUNTS if (one := whole(of_text(config, name)))]
    lists = _layer_lists(source.tensors)
    promised = _promised(text_config(config))
    odd = config.get("is_encoder_decoder") or first_architecture(config) not in known().classes
    if not lists or not counts or odd:
        return
    # Some families count halves or stacks of layers, under these names or under others.
    said = text_config(config).items()
    told = {value for name, value in said if "layer" in name and whole(value)}
    full = (one for one in lists.values() if len(one) in told and max(one) == len(one) - 1)
    numbers = next(full, lists[min(lists, key=lambda at: (at.count("."), at))])
    count = len(numbers) if len(numbers) in told and max(numbers) < len(numbers) else counts[0]
    surplus = sorted(one for one in numbers if one >= count + promised)
    lacking = [one for one in range(min(count, max(numbers) + 1000)) if one not in numbers]
    if surplus or lacking:
        yield say.ARCHITECTURE_LAYERS.at(
            "", [f"layer {one}" for one in surplus or lacking],
            found=f"{len(numbers)} layers, up to {max(numbers)}",
            expected=f"{count}, as config.json says",
        )  # fmt: skip
    own = any(key.startswith(("mtp.", "model.mtp.")) or ".mtp." in key for key in source.tensors)
    if promised and not own and not any(one >= count for one in numbers):
        yield say.MTP_MISSING.at(
            CONFIG, found=f"{promised} promised, none there", expected="their tensors, or 0"
        )


def _promised(config: Mapping[str, Any]) -> int:
    """Layers of multi-token prediction."""
    return next((one for name in _MTP if (one := whole(config.get(name))) and one > 0), 0)


def _layer_lists(keys: Iterable[str]) -> dict[str, set[int]]:
    """Numbers of layers, by the name of the list of them; those of towers are left out."""
    lists: dict[str, set[int]] = {}
    for key in keys:
        match = _LAYER.match(key)
        if match and not _TOWER.search(key) and "mtp" not in match["at"]:
            lists.setdefault(match["at"], set()).add(int(match["number"]))
    return lists
