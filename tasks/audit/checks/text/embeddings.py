"""Which tensors of a model are its embeddings, told by their keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.audit.config_fields import text_config
from tasks.audit.weights import Held

_INPUT = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "embeddings")
_OUTPUT = ("lm_head", "embed_out")
_ELSEWHERE = re.compile(
    r"\.\d+\.|position|(^|\.)(visual|vision_\w+|audio_\w+|image_\w+|qformer|mtp)\."
)
"""In layers, of which those of multi-token prediction have embeddings of their own; in towers."""
TIED_BY_DEFAULT = frozenset(
    {"gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "cohere", "cohere2", "opt", "bloom"}
)
"""Families whose configuration leaves out `tie_word_embeddings` where it is true. Of the others
some do and some do not: there nothing is concluded from silence."""


@dataclass(frozen=True)
class Embeddings:
    """Keys of a model's embeddings; "" for one that is not there.

    Attributes:
        input: of the input embedding.
        output: of the output embedding.
        tied: whether config.json says that the two are one; None where it does not say.
    """

    input: str
    output: str
    tied: bool | None


def embeddings_of(tensors: Mapping[str, Held], config: Mapping[str, Any]) -> Embeddings:
    """Look for them among a model's keys."""
    return Embeddings(_find(tensors, _INPUT), _find(tensors, _OUTPUT), is_tied(config))


def is_tied(config: Mapping[str, Any]) -> bool | None:
    """What config.json says of ties: at the top, or beside the language model's other settings."""
    places = (config, text_config(config))
    said = {one["tie_word_embeddings"] for one in places if _says(one)}
    if said:
        return said.pop() if len(said) == 1 else None  # the two disagree: loaders do, too
    return True if text_config(config).get("model_type") in TIED_BY_DEFAULT else None


def _says(config: Mapping[str, Any]) -> bool:
    return isinstance(config.get("tie_word_embeddings"), bool)


def _find(tensors: Mapping[str, Held], leaves: Iterable[str]) -> str:
    """The matrix of that name nearest to the top; "" where several are as near."""
    wanted = tuple(f"{leaf}.weight" for leaf in leaves)
    found = [
        key
        for key, held in tensors.items()
        if key.endswith(wanted)
        and key.rpartition(".")[0].rpartition(".")[2] in leaves
        and len(held.shape) == 2
        and not _ELSEWHERE.search(key)
    ]
    depth = min((key.count(".") for key in found), default=0)
    nearest = [key for key in found if key.count(".") == depth]
    return nearest[0] if len(nearest) == 1 else ""
