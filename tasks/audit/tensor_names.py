"""Names of tensors: without prefixes of wrappers, and those of embeddings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.audit.known import text_config
from tasks.audit.source import Source
from tasks.weights.files.names import PEFT_PREFIX, file_key, unwrap
from tasks.weights.files.tensors import Tensor, Tensors
from tasks.weights.heads import WRAPPER as TRL_WRAPPER

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
