"""Section `peft`: the adapter's modules in the model, and QLoRA's 4-bit base."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
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
    peft, model = context.settings["peft"], context.settings["model"]
    if peft["kind"] == "none":
        return
    yield from modules(peft, context.known)
    if peft["kind"] == "qlora":
        if context.settings["zero"]["stage"] == 3:
            allowed = "4-bit weights cannot be split; LoRA goes with ZeRO-3"
            override = "zero=zero2 or peft=lora"
            yield Finding("peft and zero", "QLoRA with ZeRO-3", allowed, override)
        if not context.gpu:
            yield from widths(context.known.text)
        yield from merged(Path(model["path"] or "").expanduser())


def modules(peft: Mapping[str, Any], known: Known) -> Iterator[Finding]:
    """Refuse modules that the model does not have, and those that are trained twice."""
    targets = peft["target_modules"]
    listed = isinstance(targets, (list, tuple))
    if targets != ALL_LINEAR and not (listed and targets):
        override = "peft.target_modules=[q_proj,v_proj] or peft.target_modules=all-linear"
        yield Finding("peft.target_modules", repr(targets), "names of modules", override)
    named = {
        "target_modules": targets if listed else (),
        "exclude_modules": peft["exclude_modules"],
        "rank_pattern": peft["rank_pattern"] or (),
        "alpha_pattern": peft["alpha_pattern"] or (),
        "modules_to_save": peft["modules_to_save"],
    }
    for key, names in named.items():
        present = known.owners if key == "modules_to_save" else known.modules
        for name in names if present else ():
            if not _exists(name, present):
                leaves = sorted({module.rpartition(".")[2] for module in present})
                near = difflib.get_close_matches(name, leaves, n=1, cutoff=0.5) or ["<module>"]
                allowed, value = f"the model has {', '.join(leaves)}", f"no {name!r} here"
                yield Finding(f"peft.{key}", value, allowed, f"peft.{key}=[{near[0]}]")
    for key in ("rank_pattern", "alpha_pattern"):
        for name, value in (peft[key] or {}).items():
            if not value > 0:
                yield Finding(f"peft.{key}", f"{name}: {value}", "more than 0", f"{name}: 16")
    for name in sorted(set(named["target_modules"]) & set(peft["modules_to_save"])):
        value = f"{name} is among peft.target_modules too"
        override = f"peft.target_modules=[{','.join(t for t in targets if t != name)}]"
        allowed = "a module is trained in full or by an adapter"
        yield Finding("peft.modules_to_save", value, allowed, override)


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


def _exists(name: str, modules: Sequence[str]) -> bool:
    """Return True if a module matches as peft does: by the end of its name, in dotted parts."""
    return any(module == name or module.endswith(f".{name}") for module in modules)
