"""The tensors of a PEFT file, by what they are: pairs, magnitudes, token rows, whole modules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tasks.audit.weights import Held
from tasks.weights.files.names import PEFT_PREFIX

_NAMED = r"(\.(?!weight$|bias$)[^.]+)?"
"""Name of the adapter, which peft itself leaves out of files."""
_HALF = re.compile(rf"(?P<module>.+)\.lora_(?P<half>[AB]){_NAMED}\.weight")
_EMBEDDING_HALF = re.compile(rf"(?P<module>.+)\.lora_embedding_(?P<half>[AB]){_NAMED}")
_MAGNITUDE = re.compile(rf"(?P<module>.+)\.lora_magnitude_vector{_NAMED}(\.weight)?")
_TOKENS = re.compile(rf"(?P<module>.+?)(\.token_adapter)?\.trainable_tokens_delta{_NAMED}")
_SAVED = re.compile(r"\.modules_to_save(\.(?!weight$|bias$)[^.]+)?(?=\.)")
_BASE_LAYER = ".base_layer"
_LAYER = re.compile(r"\.(\d+)(?=\.)")
_TAIL = re.compile(r"(?:.*?\.)?([^.]+\.\d+\..+)")


@dataclass
class Pair:
    """What an adapter holds for one module."""

    a: Held | None = None
    b: Held | None = None
    magnitude: Held | None = None

    @property
    def held(self) -> Held | None:
        """Any one of them."""
        return self.a or self.b or self.magnitude


@dataclass
class AdapterKeys:
    """An adapter's tensors.

    Attributes:
        pairs: by module, in the base model's words.
        tokens: rows of trained tokens, by embedding.
        whole: tensors that are stored whole, by the base's key for them.
        keys: key in the file of every tensor in `tokens` and `whole`, by its name there.
    """

    pairs: dict[str, Pair] = field(default_factory=dict)
    tokens: dict[str, Held] = field(default_factory=dict)
    whole: dict[str, Held] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)


def sort_keys(tensors: Mapping[str, Held]) -> AdapterKeys:
    """Tell an adapter's tensors apart by their keys."""
    found = AdapterKeys()
    for key, held in tensors.items():
        name = key.removeprefix(PEFT_PREFIX)
        half = _HALF.fullmatch(name) or _EMBEDDING_HALF.fullmatch(name)
        magnitude, tokens = _MAGNITUDE.fullmatch(name), _TOKENS.fullmatch(name)
        if half:
            pair = found.pairs.setdefault(half["module"], Pair())
            setattr(pair, half["half"].lower(), held)
        elif magnitude:
            found.pairs.setdefault(magnitude["module"], Pair()).magnitude = held
        elif tokens:
            found.tokens[tokens["module"]] = held
            found.keys[tokens["module"]] = key
        elif ".lora_" not in name:
            plain = _SAVED.sub("", name)
            found.whole[plain] = held
            found.keys[plain] = key
    return found


def plain_module(module: str) -> str:
    """A module's name in the base: targeted parameters lie in nested `base_layer`s."""
    while module.endswith(_BASE_LAYER):
        module = module.removesuffix(_BASE_LAYER)
    return module


def pattern_of(name: str) -> str:
    """A name with every layer number left open: `model.layers.*.self_attn.q_proj`."""
    return _LAYER.sub(".*", name)


def layer_of(name: str) -> int | None:
    """Number of the outermost layer that a name lies in."""
    match = _LAYER.search(name)
    return int(match[1]) if match and len(match[1]) < 9 else None


def tail_of(name: str) -> str:
    """A name from its list of layers on: what stays when a model is wrapped in another one."""
    match = _TAIL.fullmatch(name)
    return match[1] if match else name.rpartition(".")[2]
