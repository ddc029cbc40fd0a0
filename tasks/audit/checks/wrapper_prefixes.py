"""Residue in key names: what wrappers put around a model, and a save should have taken off."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tasks.audit.catalogue import residue as say
from tasks.audit.catalogue.entry import Entry
from tasks.audit.finding import Finding
from tasks.audit.source import Source
from tasks.weights.files.names import PEFT_PREFIX, unwrap

TRL_WRAPPER = "pretrained_model."
_PEFT = re.compile(
    r"(^|\.)(base_layer|lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|modules_to_save|"
    r"original_module|token_adapter)(\.|$)"
)
_NAMED = re.compile(
    r"\.(lora_[AB]|lora_magnitude_vector)\.(?!(weight|bias)$)(?P<name>[^.]+)(\.weight|\.bias)?$"
    r"|\.(lora_embedding_[AB]|trainable_tokens_delta)\.(?P<other>[^.]+)$"
    r"|\.modules_to_save\.(?!(weight|bias)$)(?P<saved>[^.]+)\.(weight|bias)$"
)
"""Keys as a live PEFT model has them, with the adapter's name in them."""


def check(source: Source) -> Iterator[Finding]:
    """Keys of a model, or of an adapter."""
    if source.is_adapter:
        yield from _adapter(source)
    elif source.is_model:
        yield from _model(source)


def _model(source: Source) -> Iterator[Finding]:
    peft = [k for k in source.tensors if PEFT_PREFIX in k or _PEFT.search(k)]
    if peft:
        yield say.PEFT_RESIDUE.at(
            source.tensors[peft[0]].file, peft, found=f"{len(peft)} keys of a PEFT model",
            expected="the model's own names",
        )  # fmt: skip
    wrapped = [k for k in source.tensors if unwrap(k) != k]
    yield from _wrapped(source, wrapped, say.WRAPPER_RESIDUE)
    trls = [k for k in source.tensors if unwrap(k) == k and k.startswith(TRL_WRAPPER)]
    yield from _wrapped(source, trls, say.TRL_RESIDUE)


def _adapter(source: Source) -> Iterator[Finding]:
    keys = [key for key in source.tensors if "v_head." not in key]
    wrapped = [key for key in keys if unwrap(key) != key]
    yield from _wrapped(source, wrapped, say.WRAPPER_RESIDUE)
    named = [key for key in keys if _NAMED.search(key)]
    if named:
        yield say.ADAPTER_NAME_IN_KEYS.at(
            source.tensors[named[0]].file, named, found=f"{len(named)} keys with a name in them",
            expected=f"{PEFT_PREFIX}<module>.lora_A.weight",
        )  # fmt: skip
    bare = [key for key in keys if not unwrap(key).startswith(PEFT_PREFIX)]
    if bare:
        yield say.ADAPTER_PREFIX.at(
            source.tensors[bare[0]].file, bare, found=f"{len(bare)} of {len(keys)} keys without it",
            expected=f"{PEFT_PREFIX}<module>.lora_A.weight",
        )  # fmt: skip


def _wrapped(source: Source, keys: list[str], entry: Entry) -> Iterator[Finding]:
    if keys:
        yield entry.at(
            source.tensors[keys[0]].file, keys, found=f"{len(keys)} keys with a wrapper's name",
            expected="the model's own names",
        )  # fmt: skip
