"""Section `peft`: the adapter's modules in the model, and QLoRA's 4-bit base."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.config.checks.context import Context, Known
from tasks.core.errors import ArtifactError
from tasks.core.finding import Finding
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.quantized.nf4 import LOST_ALLOWED, LOST_OVERRIDE, lost_in_4_bits

ALL_LINEAR = "all-linear"
BLOCK = 64
"""Weights that share a scale in bitsandbytes' 4-bit formats."""
_WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size")


def problems(context: Context) -> Iterator[Finding]:
    """Yield the problems of the adapter that need no loaded model."""
    peft, path = context.settings["peft"], context.settings["model"]["path"]
    if peft["kind"] == "none":
        return
    yield from modules(peft, context.known)
    yield from _head_under_zero3(context.settings)
    if peft["kind"] == "qlora":
        if not context.gpu:
            yield from widths(context.known.text)
        yield from merged(Path(path or "").expanduser())


def modules(peft: Mapping[str, Any], known: Known) -> Iterator[Finding]:
    """Refuse modules that the model does not have; peft reports one only if all are wrong."""
    targets = peft["target_modules"]
    if isinstance(targets, str) and targets != ALL_LINEAR:
        override = f"peft.target_modules=[{targets}] or peft.target_modules={ALL_LINEAR}"
        yield Finding("peft.target_modules", targets, "a list of names", override)
    for key in (
        "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "modules_to_save",
    ):  # fmt: skip
        present = known.owners if key == "modules_to_save" else known.modules
        names = [] if isinstance(peft[key], str) or not present else peft[key] or []
        for name in names:
            # As peft matches: by the end of a module's name, in dotted parts.
            if any(f".{module}".endswith(f".{name}") for module in present):
                continue
            leaves = sorted({module.rpartition(".")[2] for module in present})
            near = difflib.get_close_matches(name, leaves, n=1, cutoff=0.5) or ["<module>"]
            allowed = f"the model has {', '.join(leaves)}"
            yield Finding(f"peft.{key}", f"no {name!r} here", allowed, f"peft.{key}=[{near[0]}]")


def _head_under_zero3(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Refuse adapters on a head that ZeRO-3 partitions: each portion of logits would gather it."""
    targets = settings["peft"]["target_modules"]
    tables = set(() if isinstance(targets, str) else targets) & {"lm_head"}
    new = settings["model"]["new_tokens"]
    if settings["zero"]["stage"] == 3 and (tables or new):
        key = "model.new_tokens" if new else "peft.target_modules"
        allowed = "ZeRO-3 divides embeddings and head, which these adapters read whole"
        yield Finding(key, f"{', '.join(new or sorted(tables))} with ZeRO-3", allowed, "zero=zero2")


def widths(text: Mapping[str, Any]) -> Iterator[Finding]:
    """Refuse QLoRA on a CPU if a linear layer's input is not a whole number of 4-bit blocks.

    The AVX-512 kernel of bitsandbytes 0.50.2 takes wrong scales there, so that training would use
    other weights than the base and the served model.
    """
    odd = [f"{name}={text[name]}" for name in _WIDTHS if (text.get(name) or 0) % BLOCK]
    if odd:
        allowed = f"on a CPU bitsandbytes needs multiples of {BLOCK}: other rows get wrong scales"
        yield Finding("peft.kind", f"qlora, and {', '.join(odd)}", allowed, "peft=lora")


def merged(folder: Path) -> Iterator[Finding]:
    """Refuse QLoRA on a merged QLoRA model: quantising it again would undo that training.

    Other checks report a folder that cannot be read.
    """
    if (folder / "config.json").is_file():
        try:
            lost = lost_in_4_bits(read_checkpoint(folder))
        except ArtifactError:
            return
        if lost is not None:
            value = f"a merged QLoRA model: {lost}"
            yield Finding("model.path", value, LOST_ALLOWED, LOST_OVERRIDE)
