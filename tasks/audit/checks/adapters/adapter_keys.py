"""Sort the tensors of a PEFT file: LoRA pairs, magnitudes, token rows, full tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tasks.audit.weights import StoredTensor
from tasks.weights.files.names import PEFT_PREFIX, unwrap

_NAMED = r"(\.(?!weight$|bias$)[^.]+)?"
"""Name of the adapter, which peft removes when it saves."""
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
    """LoRA tensors of one module."""

    a: StoredTensor | None = None
    b: StoredTensor | None = None
    magnitude: StoredTensor | None = None

    @property
    def file(self) -> str:
        """File of the first of its tensors."""
        return next((t.file for t in (self.a, self.b, self.magnitude) if t is not None), "")


@dataclass
class AdapterKeys:
    """The tensors of an adapter.

    Attributes:
        pairs: LoRA pairs by module name in the base.
        tokens: rows of trained tokens, by embedding.
        whole: tensors that are stored in full, by their key in the base.
        keys: key in the file, by name in `tokens` or `whole`.
    """

    pairs: dict[str, Pair] = field(default_factory=dict)
    tokens: dict[str, StoredTensor] = field(default_factory=dict)
    whole: dict[str, StoredTensor] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)


def sort_keys(tensors: Mapping[str, StoredTensor]) -> AdapterKeys:
    """Sort an adapter's tensors by their keys, less prefixes of wrappers."""
    result = AdapterKeys()
    for key, tensor in tensors.items():
        name = unwrap(key).removeprefix(PEFT_PREFIX)
        half = _HALF.fullmatch(name) or _EMBEDDING_HALF.fullmatch(name)
        magnitude, tokens = _MAGNITUDE.fullmatch(name), _TOKENS.fullmatch(name)
        if half:
            pair = result.pairs.setdefault(half["module"], Pair())
            setattr(pair, half["half"].lower(), tensor)
        elif magnitude:
            result.pairs.setdefault(magnitude["module"], Pair()).magnitude = tensor
        elif tokens:
            result.tokens[tokens["module"]] = tensor
            result.keys[tokens["module"]] = key
        elif ".lora_" not in name:
            plain = _SAVED.sub("", name)
            result.whole[plain] = tensor
            result.keys[plain] = key
    return result


def plain_module(module: str) -> str:
    """Return a module's name in the base, without the `base_layer`s of targeted parameters."""
    while module.endswith(_BASE_LAYER):
        module = module.removesuffix(_BASE_LAYER)
    return module


def pattern_of(name: str) -> str:
    """Return a name with `*` for layer numbers: `model.layers.*.self_attn.q_proj`."""
    return _LAYER.sub(".*", name)


def layer_of(name: str) -> int | None:
    """Return the number of the outermost layer in a name, or None."""
    match = _LAYER.search(name)
    return int(match[1]) if match and len(match[1]) < 9 else None


def tail_of(name: str) -> str:
    """Return the end of a name from its layer list on, which wrapping the model does not change."""
    match = _TAIL.fullmatch(name)
    return match[1] if match else name.rpartition(".")[2]
