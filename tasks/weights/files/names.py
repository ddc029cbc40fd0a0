"""Translate tensor names between a live PEFT model, a PEFT file and a base checkpoint.

    live   base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight
    PEFT   base_model.model.model.layers.0.mlp.up_proj.lora_A.weight
    base                    model.layers.0.mlp.up_proj.weight

Prefixes that DeepSpeed, torch.compile or activation checkpointing add to live names are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from tasks.core.errors import ContractError, first_and_more

PEFT_PREFIX = "base_model.model."
_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
"""Number of an expert in a key."""
_LORA_FILE = re.compile(re.escape(PEFT_PREFIX) + r"(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_LIVE = [
    # name in `named_parameters()` of a PEFT model: name in its file
    (re.compile(re.escape(PEFT_PREFIX) + live), PEFT_PREFIX + kept)
    for live, kept in (
        (r"(?P<at>.+\.lora_[AB])\.(?P<adapter>[^.]+)(?P<tail>\.weight|\.bias)", r"\g<at>\g<tail>"),
        (r"(?P<at>.+\.lora_embedding_[AB])\.(?P<adapter>[^.]+)", r"\g<at>"),
        (r"(?P<at>.+\.lora_magnitude_vector)\.(?P<adapter>[^.]+)\.weight", r"\g<at>"),
        (r"(?P<at>.+)\.modules_to_save\.(?P<adapter>[^.]+)(?P<tail>\..+)", r"\g<at>\g<tail>"),
        (r"(?P<at>.+\.trainable_tokens_delta)\.(?P<adapter>[^.]+)", r"\g<at>"),
    )
]


class LoraKey(NamedTuple):
    """A LoRA tensor: the name of its module in the base model, and which factor it is."""

    module: str
    half: str  # "A" or "B"


def unwrap(name: str) -> str:
    """Drop the prefixes that DeepSpeed, torch.compile and activation checkpointing add."""
    for wrapper in _WRAPPERS:
        if name.startswith(wrapper):
            return unwrap(name[len(wrapper) :])
        name = name.replace(f".{wrapper}", ".")
    return name


def without_wrappers(names: Iterable[str]) -> dict[str, str]:
    """Map keys without wrapper prefixes to the stored ones; stored to stored if two would agree."""
    stored = list(names)
    plain = {unwrap(name): name for name in stored}
    return plain if len(plain) == len(stored) else {name: name for name in stored}


def file_key(plain: str) -> tuple[str, str]:
    """Return the key in a PEFT file of a live name, and its adapter; the name and "" for others."""
    for live, kept in _LIVE:
        if match := live.fullmatch(plain):
            return match.expand(kept), match["adapter"]
    return plain, ""


def live_to_peft(name: str, adapter: str = "default") -> str:
    """Return the PEFT file key of a trainable parameter of a live PEFT model.

    Covers LoRA factors (of linear layers, embeddings, experts), DoRA magnitudes, modules saved as
    a whole, token rows, and biases, which keep the base's name. Raises ContractError for others.
    """
    plain = unwrap(name)
    key, owner = file_key(plain)
    if owner == adapter:
        return key
    if plain.startswith(PEFT_PREFIX) and plain.endswith(".bias") and ".lora_" not in plain:
        return plain
    raise ContractError(
        f"{name}: trainable, but no parameter of adapter {adapter!r}",
        hint="freeze it: only parameters that PEFT saves with that adapter can be gathered",
    )


def parse_peft(key: str) -> LoraKey | None:
    """Parse a PEFT file key; None for anything that is not a plain LoRA weight."""
    match = _LORA_FILE.fullmatch(key)
    return LoraKey(match["module"], match["half"]) if match else None


def rename_all(names: Iterable[str], *, adapter: bool) -> dict[str, str]:
    """Map every live parameter name to its key in a PEFT file, or to the model's own name.

    Raises ContractError with every name that has no key, or the key of another name.
    """
    keys: dict[str, str] = {}
    owners: dict[str, str] = {}
    findings: list[str] = []
    for name in names:
        try:
            key = live_to_peft(name) if adapter else unwrap(name)
        except ContractError as error:
            findings.append(error.message)
            continue
        if key in owners:
            findings.append(f"{name} and {owners[key]} both become {key}")
        keys[name], owners[key] = key, name
    if findings:
        raise ContractError(f"gather: {first_and_more(findings)}", details=findings)
    return keys
