"""Check tensor names for prefixes of wrappers that saving should have removed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from tasks.audit.catalogue.tensors import Residue
from tasks.audit.finding import Entry, Finding
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
"""Keys of a PEFT model in memory, which contain the adapter's name."""
_NO_EFFECT = (
    "peft loads it without effect: it finds none of its tensors, warns, and the model answers as "
    "the base"
)
_OWN, _PAIR = "the model's own names", f"{PEFT_PREFIX}<module>.lora_A.weight"


def check(source: Source) -> Iterator[Finding]:
    """Check the keys of a model or of an adapter."""
    if source.is_adapter:
        yield from _adapter(source)
    elif source.is_model:
        yield from _model(source)


def _model(source: Source) -> Iterator[Finding]:
    peft = [key for key in source.tensors if PEFT_PREFIX in key or _PEFT.search(key)]
    yield from Residue.PEFT_RESIDUE.of(
        source, peft, found=f"{len(peft)} keys of a PEFT model", expected=_OWN
    )
    wrapped = [key for key in source.tensors if unwrap(key) != key]
    yield from _wrapped(source, wrapped, Residue.WRAPPER_RESIDUE)
    trls = [key for key in source.tensors if unwrap(key) == key and key.startswith(TRL_WRAPPER)]
    yield from _wrapped(source, trls, Residue.TRL_RESIDUE)


def _adapter(source: Source) -> Iterator[Finding]:
    keys = [key for key in source.tensors if "v_head." not in key]
    wrapped = [key for key in keys if unwrap(key) != key]
    yield from _wrapped(source, wrapped, Residue.WRAPPER_RESIDUE, _NO_EFFECT)
    named = [key for key in keys if _NAMED.search(key)]
    yield from Residue.ADAPTER_NAME_IN_KEYS.of(
        source, named, found=f"{len(named)} keys with an adapter name", expected=_PAIR
    )
    bare = [key for key in keys if not unwrap(key).startswith(PEFT_PREFIX)]
    without = f"{len(bare)} of {len(keys)} keys without the prefix"
    yield from Residue.ADAPTER_PREFIX.of(source, bare, found=without, expected=_PAIR)


def _wrapped(source: Source, keys: list[str], entry: Entry, why: str = "") -> Iterator[Finding]:
    count = f"{len(keys)} keys with a wrapper's name"
    for finding in entry.of(source, keys, found=count, expected=_OWN):
        yield replace(finding, why=why) if why else finding
