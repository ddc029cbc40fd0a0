"""Fields of configuration files, names of tensors, and the classes that transformers has.

The files are untrusted: a field of a wrong type counts as absent. `tests/audit/test_known.py`
makes `known_classes.json` from the installed library, whose import takes longer than an audit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tasks.audit.source import Kind, Source
from tasks.weights.files.names import PEFT_PREFIX, file_key, unwrap
from tasks.weights.files.tensors import Tensor, Tensors
from tasks.weights.heads import WRAPPER as TRL_WRAPPER
from tasks.weights.tokens.tokenizer import default_template


@cache
def known_classes() -> Mapping[str, frozenset[str]]:
    """Return the classes of transformers that generate or classify, by `model_type`."""
    raw = json.loads(Path(__file__).with_name("known_classes.json").read_text())
    return {kind: frozenset(names) for kind, names in raw["classes"].items()}


_TEXT = ("text_config", "llm_config", "language_config")
_NO_PARTS = {"quantization_config", "compression_config"}
_TOWERS = ("vision_config", "audio_config", "vit_config", "visual")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the language model.

    Multimodal models keep them in a mapping of their own, e.g. `text_config`.
    """
    for name in _TEXT:
        if isinstance(config.get(name), Mapping):
            return config[name]
    return config


def of_text(config: Mapping[str, Any], name: str) -> Any:
    """Return one setting of the language model, from its own mapping or from the top level."""
    inner = text_config(config).get(name)
    return config.get(name) if inner is None else inner


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Return True if the model has a vision or audio tower."""
    return any(isinstance(config.get(name), Mapping) for name in _TOWERS)


def is_plain_text(config: Mapping[str, Any]) -> bool:
    """Return True for a language model's own configuration without sub-configurations."""
    parts = {name for name in config if name.endswith("_config")} - _NO_PARTS
    return not is_multimodal(config) and not any(
        isinstance(config[name], Mapping) for name in parts
    )


def whole(value: Any) -> int | None:
    """Return the value if it is an integer (`true` is not), else None."""
    return value if type(value) is int else None


def texts(value: Any) -> tuple[str, ...]:
    """Return a list of strings as a tuple; a single string gives a tuple of one."""
    if isinstance(value, str):
        return (value,)
    return tuple(text for text in value if isinstance(text, str)) if isinstance(value, list) else ()


def token_ids(value: Any) -> tuple[int, ...]:
    """Return `eos_token_id` or a similar field as a tuple: it holds one id or a list of ids."""
    values: Iterable[Any] = value if isinstance(value, list) else [value]
    return tuple(number for number in values if type(number) is int)


def first_architecture(config: Mapping[str, Any]) -> str:
    """Return the first class that config.json names, or ""."""
    return next(iter(texts(config.get("architectures"))), "")


def content(value: Any) -> str:
    """Return the text of a token, which is a string or a mapping with `content`, or ""."""
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else ""


_INFIX = re.compile(r"\.base_layer\.|\.modules_to_save\.[^.]+\.")
_ORIGINAL = ".original_module."
"""Part of the key of an untrained copy, which PEFT keeps beside a module of `modules_to_save`."""
_LORA = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(\.|$)")
_LEFT_BY_PEFT = re.compile(r"\.(lora_\w+|original_module|token_adapter)(\.|$)")


def model_name(key: str) -> str:
    """Return the key of a model's tensor without prefixes of wrappers, TRL and PEFT."""
    plain = unwrap(key).removeprefix(TRL_WRAPPER)
    return _INFIX.sub(".", unwrap(plain).removeprefix(PEFT_PREFIX))


def adapter_name(key: str) -> str:
    """Return the key of an adapter's tensor as PEFT saves it."""
    plain = unwrap(key)
    if "v_head." in plain:
        return plain
    plain = plain if plain.startswith(PEFT_PREFIX) else f"{PEFT_PREFIX}{plain}"
    return file_key(plain)[0]


def plain_tensors(source: Source) -> Tensors:
    """Return the tensors of a model under the names that they have without wrappers."""
    if not source.is_model:
        return source.tensors
    names: dict[str, Tensor] = {}
    for key, tensor in source.tensors.items():
        if not _LEFT_BY_PEFT.search(key):
            names.setdefault(model_name(key), tensor)
    return names


def new_names(source: Source) -> dict[str, str]:
    """Return the key in the file by the key that it should have; untrained copies are left out."""
    clean = adapter_name if source.is_adapter else model_name
    keys = (key for key in source.tensors if source.is_adapter or _ORIGINAL not in key)
    return {clean(key): key for key in keys}


def cannot_rename(source: Source) -> list[str]:
    """Return the reasons why names cannot be corrected without loss."""
    keys = [key for key in source.tensors if source.is_adapter or _ORIGINAL not in key]
    names = new_names(source)
    lora = [key for key in keys if _LORA.search(key)]
    if lora and not source.is_adapter:
        return [
            f"{lora[0]}: the adapter was never merged into these weights: save it as an adapter, "
            "and deliver that with its base"
        ]
    lost = [key for key in keys if key not in names.values()]
    return [f"{key}: another tensor would have the same name" for key in lost]


_TAIL = re.compile(r"(?:.*?\.)?([^.]+\.\d+\..+)")


def tail_of(name: str) -> str:
    """Return the end of a name from its layer list on, which wrapping the model does not change."""
    match = _TAIL.fullmatch(name)
    return match[1] if match else name.rpartition(".")[2]


INPUT = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "embeddings")
OUTPUT = ("lm_head", "embed_out")
"""Names of the modules of embeddings."""
TOWER = re.compile(
    r"(^|\.)(visual|vision_tower|vision_model|vision_encoder|image_tower|video_tower|audio_tower|"
    r"multi_modal_projector|mlp1)\."
)
_ELSEWHERE = re.compile(
    r"\.\d+\.|position|(^|\.)(visual|vision_\w+|audio_\w+|image_\w+|qformer|mtp)\."
)
"""Keys of layers (multi-token prediction has its own embeddings) and of towers."""
_TIED_BY_DEFAULT = frozenset(
    {"gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "cohere", "cohere2", "opt", "bloom"}
)
"""Families that omit `tie_word_embeddings` if it is true. In other families an absent setting means
nothing."""


@dataclass(frozen=True)
class Embeddings:
    """Keys of a model's embeddings, "" if there is none; and if config.json ties them, or None."""

    input: str
    output: str
    tied: bool | None


def embeddings_of(tensors: Tensors, config: Mapping[str, Any]) -> Embeddings:
    """Find the embeddings among a model's keys."""
    read = [settings.get("tie_word_embeddings") for settings in (config, text_config(config))]
    stated = {value for value in read if isinstance(value, bool)}
    tied: bool | None = None  # also if the two disagree: loaders read different ones
    if len(stated) == 1:
        (tied,) = stated
    elif not stated and text_config(config).get("model_type") in _TIED_BY_DEFAULT:
        tied = True
    return Embeddings(_find(tensors, INPUT), _find(tensors, OUTPUT), tied)


def _find(tensors: Tensors, leaves: tuple[str, ...]) -> str:
    """Return the matrix with that name nearest to the top level; "" if several are equally near."""
    keys = [
        key
        for key, tensor in tensors.items()
        if key.endswith(".weight")
        and key.removesuffix(".weight").rpartition(".")[2] in leaves
        and len(tensor.shape) == 2
        and not _ELSEWHERE.search(key)
    ]
    depth = min((key.count(".") for key in keys), default=0)
    nearest = [key for key in keys if key.count(".") == depth]
    return nearest[0] if len(nearest) == 1 else ""


JINJA, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
PROCESSOR_TEMPLATES = ("chat_template.json", "processor_config.json")
_DOCUMENTS = (SETTINGS, *PROCESSOR_TEMPLATES)


def writes_chats(source: Source) -> bool:
    """Return True for an adapter or a model that writes text."""
    return source.is_adapter or source.kind in (Kind.MODEL, Kind.VALUE)


def template_places(source: Source) -> dict[str, str]:
    """Return the default template by the file that holds it, without empty ones."""
    texts = {JINJA: source.folder.text(JINJA)}
    for name in _DOCUMENTS:
        texts[name] = default_template(source.config(name).get("chat_template"))
    return {name: text.strip("\n") for name, text in texts.items() if text.strip()}
