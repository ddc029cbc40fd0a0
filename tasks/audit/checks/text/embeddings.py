"""Find the embeddings of a model by their keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.audit.config_fields import text_config
from tasks.audit.weights import StoredTensor

_INPUT = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "embeddings")
_OUTPUT = ("lm_head", "embed_out")
_ELSEWHERE = re.compile(
    r"\.\d+\.|position|(^|\.)(visual|vision_\w+|audio_\w+|image_\w+|qformer|mtp)\."
)
"""Keys of layers (multi-token prediction has its own embeddings) and of towers."""
TIED_BY_DEFAULT = frozenset(
    {"gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "cohere", "cohere2", "opt", "bloom"}
)
"""Families that omit `tie_word_embeddings` if it is true. In other families an absent setting means
nothing."""


@dataclass(frozen=True)
class Embeddings:
    """Keys of a model's embeddings; "" if there is none.

    Attributes:
        input: key of the input embedding.
        output: key of the output embedding.
        tied: True if config.json ties the two; None if it does not say.
    """

    input: str
    output: str
    tied: bool | None


def embeddings_of(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> Embeddings:
    """Find the embeddings among a model's keys."""
    return Embeddings(_find(tensors, _INPUT), _find(tensors, _OUTPUT), is_tied(config))


def is_tied(config: Mapping[str, Any]) -> bool | None:
    """Return `tie_word_embeddings`, from the top level or the language model's settings."""
    places = (config, text_config(config))
    read = [settings.get("tie_word_embeddings") for settings in places]
    values = {value for value in read if isinstance(value, bool)}
    if values:  # loaders read different ones if they disagree
        return values.pop() if len(values) == 1 else None
    return True if text_config(config).get("model_type") in TIED_BY_DEFAULT else None


def _find(tensors: Mapping[str, StoredTensor], leaves: Iterable[str]) -> str:
    """Return the matrix with that name nearest to the top level; "" if several are equally near."""
    wanted = tuple(f"{leaf}.weight" for leaf in leaves)
    keys = [
        key
        for key, tensor in tensors.items()
        if key.endswith(wanted)
        and key.rpartition(".")[0].rpartition(".")[2] in leaves
        and len(tensor.shape) == 2
        and not _ELSEWHERE.search(key)
    ]
    depth = min((key.count(".") for key in keys), default=0)
    nearest = [key for key in keys if key.count(".") == depth]
    return nearest[0] if len(nearest) == 1 else ""
