"""Rename tensors: remove prefixes of wrappers."""

from __future__ import annotations

import re
from collections.abc import Callable

from tasks.audit.checks.wrapper_prefixes import TRL_WRAPPER
from tasks.audit.repair.draft import Draft
from tasks.weights.files.names import PEFT_PREFIX, unwrap

_INFIX = re.compile(r"\.base_layer\.|\.modules_to_save\.[^.]+\.")
_ORIGINAL = ".original_module."
_LORA = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(\.|$)")
_NAMED = (
    (re.compile(r"(?P<at>.+\.lora_[AB])\.(?!(?:weight|bias)$)[^.]+(?P<tail>\.weight|\.bias)"),
     r"\g<at>\g<tail>"),
    (re.compile(r"(?P<at>.+\.lora_embedding_[AB])\.[^.]+"), r"\g<at>"),
    (re.compile(r"(?P<at>.+\.lora_magnitude_vector)\.[^.]+(\.weight)?"), r"\g<at>"),
    (re.compile(r"(?P<at>.+)\.modules_to_save\.[^.]+(?P<tail>\.(weight|bias))"), r"\g<at>\g<tail>"),
    (re.compile(r"(?P<at>.+\.trainable_tokens_delta)\.[^.]+"), r"\g<at>"),
)  # fmt: skip
"""Pattern of a key of a PEFT model in memory, and the key in its file."""


def strip_residue(draft: Draft) -> None:
    """Remove wrapper prefixes from every name; refuse if two tensors would share a name."""
    rename = _adapter_name if draft.source.is_adapter else _model_name
    if not draft.source.is_adapter:
        lora = [key for key in draft.names if _LORA.search(key)]
        if lora:
            draft.refused.append(
                f"{lora[0]}: the adapter was never merged into these weights: save it as an "
                "adapter, and deliver that with its base"
            )
            return
        _drop_originals(draft)
    _rename_all(draft, rename)


def _rename_all(draft: Draft, rename: Callable[[str], str]) -> None:
    names: dict[str, str] = {}
    for new, old in draft.names.items():
        clean = rename(new)
        if clean in names:
            draft.refused.append(f"{old} and {names[clean]}: both would be named {clean}")
        names[clean] = old
    changed = [(old, new) for new, old in names.items() if new != old]
    if changed:
        old, new = changed[0]
        draft.done.append(f"{len(changed)} keys without wrapper prefixes: {old} is now {new}")
    draft.names = names


def _drop_originals(draft: Draft) -> None:
    """Drop untrained copies: PEFT keeps one beside each module of `modules_to_save`."""
    for key in [key for key in draft.names if _ORIGINAL in key]:
        del draft.names[key]
        draft.done.append(f"{key}: left out, the trained copy is kept")


def _model_name(key: str) -> str:
    plain = unwrap(key).removeprefix(TRL_WRAPPER)
    return _INFIX.sub(".", unwrap(plain).removeprefix(PEFT_PREFIX))


def _adapter_name(key: str) -> str:
    plain = unwrap(key)
    if "v_head." in plain:
        return plain
    for live, kept in _NAMED:
        match = live.fullmatch(plain)
        if match:
            plain = match.expand(kept)
    return plain if plain.startswith(PEFT_PREFIX) else f"{PEFT_PREFIX}{plain}"
