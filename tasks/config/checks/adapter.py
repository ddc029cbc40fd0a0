"""Section `peft`: options of an adapter, its modules in the model, and QLoRA's 4-bit base."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.config.checks.machine import parse_version
from tasks.config.checks.model import ALL_LINEAR, Known
from tasks.core.errors import ArtifactError
from tasks.core.finding import Finding
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.quantized.nf4 import LOST_ALLOWED, LOST_OVERRIDE, lost_in_4_bits

_OF_ADAPTERS = (
    "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "exclude_modules",
)  # fmt: skip
"""Settings that only an adapter has, off by default."""
BLOCK = 64
"""Weights that share a scale in bitsandbytes' 4-bit formats."""
_WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size")


def adapter(peft: Mapping[str, Any], known: Known) -> list[Finding]:
    """Return the findings about section `peft` that need no loaded model.

    Args:
        peft: the section.
        known: facts about the base model.
    """
    if peft["kind"] == "none":
        return list(_without_adapter(peft))
    return [*_patterns(peft, known), *_modules(peft, known)]


def new_tokens(tokens: Sequence[str], multiple: int) -> list[Finding]:
    """Refuse blank or repeated tokens.

    Args:
        tokens: `model.new_tokens`.
        multiple: `model.vocab_multiple`.
    """
    key, findings = "model.new_tokens", []
    if any(not token.strip() for token in tokens) or len(set(tokens)) < len(tokens):
        value, allowed = repr(list(tokens)), "texts, each of them once"
        findings.append(Finding(key, value, allowed, "model.new_tokens=['<tool>']"))
    if multiple < 1:
        key = "model.vocab_multiple"
        findings.append(Finding(key, str(multiple), "at least 1", f"{key}=64"))
    return findings


def targets(wanted: object, kind: str, known: Known) -> list[Finding]:
    """Refuse adapter targets that the model does not have.

    Args:
        wanted: `peft.target_modules`.
        kind: `peft.kind`.
        known: facts about the base model.
    """
    if kind == "none" or wanted == ALL_LINEAR:
        return []
    example = "peft.target_modules=[q_proj,v_proj] or peft.target_modules=all-linear"
    if not isinstance(wanted, (list, tuple)) or not all(isinstance(w, str) for w in wanted):
        allowed = f'"{ALL_LINEAR}" or a list of module names'
        return [Finding("peft.target_modules", repr(wanted), allowed, example)]
    if not wanted:
        return [Finding("peft.target_modules", "an empty list", "at least one module", example)]
    leaves = _leaves(known.modules)
    findings = []
    for target in wanted if leaves else ():
        if not _exists(target, known.modules):
            near = difflib.get_close_matches(target, leaves, n=2, cutoff=0.5)
            override = f"peft.target_modules=[{','.join(near)}]" if near else example
            allowed, value = f"the model has {', '.join(leaves)}", f"no {target!r} here"
            findings.append(Finding("peft.target_modules", value, allowed, override))
    return findings


def qlora_with_zero3(kind: str, stage: int) -> list[Finding]:
    """Refuse QLoRA with ZeRO-3, which partitions parameters: a 4-bit block cannot be split."""
    if kind != "qlora" or stage != 3:
        return []
    allowed = "4-bit weights cannot be split; QLoRA goes with ZeRO-0 to 2, LoRA with ZeRO-3"
    return [Finding("peft and zero", "QLoRA with ZeRO-3", allowed, "zero=zero2 or peft=lora")]


def lora_with_zero3(kind: str, stage: int, deepspeed: str) -> list[Finding]:
    """Refuse a DeepSpeed before 0.19.3, which loses gradients of adapters under ZeRO-3."""
    if kind != "lora" or stage != 3 or parse_version(deepspeed) >= (0, 19, 3):
        return []
    value = f"LoRA with ZeRO-3 on DeepSpeed {deepspeed}"
    return [Finding("deepspeed", value, "needs DeepSpeed >= 0.19.3", "zero=zero2")]


def merge_base(base: str, kind: str) -> list[Finding]:
    """Check that an adapter is merged into the base that it was trained on.

    Args:
        base: `merge.base`.
        kind: `peft.kind`.
    """
    if base == "dequantized" and kind != "qlora":
        value = f"dequantized with peft.kind={kind}"
        return [Finding("merge.base", value, "only QLoRA quantises the base", "merge.base=auto")]
    if base == "original" and kind == "qlora":
        allowed = "the adapter was trained on the dequantised base; expect drift"
        value = "original after QLoRA"
        return [Finding("merge.base", value, allowed, "merge.base=auto", "warning")]
    return []


def widths(kind: str, config: Mapping[str, Any], *, gpu: bool) -> list[Finding]:
    """Refuse QLoRA on a CPU if a linear layer's input is not a whole number of 4-bit blocks.

    The AVX-512 kernel of bitsandbytes 0.50.2 takes wrong scales there, so that training would use
    other weights than the base and the served model.

    Args:
        kind: `peft.kind`.
        config: contents of the base's config.json.
        gpu: True if ranks train on GPUs.
    """
    if kind != "qlora" or gpu:
        return []
    text = config.get("text_config") or config
    odd = [f"{name}={text[name]}" for name in _WIDTHS if (text.get(name) or 0) % BLOCK]
    if not odd:
        return []
    allowed = f"on a CPU bitsandbytes needs multiples of {BLOCK}: other rows get wrong scales"
    return [Finding("peft.kind", f"qlora, and {', '.join(odd)}", allowed, "peft=lora")]


def merged(kind: str, folder: Path) -> list[Finding]:
    """Refuse QLoRA on a merged QLoRA model: quantising it again would undo that training.

    Other checks report a folder that cannot be read.
    """
    if kind != "qlora" or not (folder / "config.json").is_file():
        return []
    try:
        lost = lost_in_4_bits(read_checkpoint(folder))
    except ArtifactError:
        return []
    if lost is None:
        return []
    return [Finding("model.path", f"a merged QLoRA model: {lost}", LOST_ALLOWED, LOST_OVERRIDE)]


def _without_adapter(peft: Mapping[str, Any]) -> Iterator[Finding]:
    keys = [f"peft.{key}" for key in _OF_ADAPTERS if peft[key]]
    if peft["init"] != "default":
        keys.append("peft.init")
    for key in keys:
        yield Finding(key, "set with peft.kind=none", "only an adapter has it", "peft=lora")


def _patterns(peft: Mapping[str, Any], known: Known) -> Iterator[Finding]:
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = peft[key] or {}
        if not isinstance(pattern, dict) or not all(
            isinstance(value, (int, float)) for value in pattern.values()
        ):
            example = "'peft.rank_pattern={q_proj: 16}'"
            yield Finding(f"peft.{key}", repr(pattern), "a number by module name", example)
            continue
        for name, value in pattern.items():
            if value <= 0:
                yield Finding(f"peft.{key}", f"{name}: {value:g}", "more than 0", f"{name}: 16")
            if known.modules and not _exists(name, known.modules):
                yield _absent(f"peft.{key}", name, known.modules)


def _modules(peft: Mapping[str, Any], known: Known) -> Iterator[Finding]:
    if not known.modules:
        return
    for name in peft["exclude_modules"] or ():
        if not _exists(name, known.modules):
            yield _absent("peft.exclude_modules", name, known.modules)
    for name in peft["modules_to_save"] or ():
        if not _exists(name, known.owners or known.modules):
            yield _absent("peft.modules_to_save", name, known.owners or known.modules)
    yield from _twice(peft)


def _twice(peft: Mapping[str, Any]) -> Iterator[Finding]:
    """Refuse modules that are adapted and trained in full."""
    adapted = peft["target_modules"]
    if adapted == ALL_LINEAR or not isinstance(adapted, (list, tuple)):
        return
    for name in sorted(set(adapted) & set(peft["modules_to_save"] or ())):
        yield Finding(
            "peft.modules_to_save",
            f"{name} is among peft.target_modules too",
            "a module is trained in full or by an adapter",
            f"peft.target_modules=[{','.join(t for t in adapted if t != name)}]",
        )


def _exists(name: str, modules: Sequence[str]) -> bool:
    """Return True if a module matches as peft does: by the end of its name, in dotted parts."""
    return any(module == name or module.endswith(f".{name}") for module in modules)


def _leaves(modules: Sequence[str]) -> list[str]:
    return sorted({module.rpartition(".")[2] for module in modules})


def _absent(key: str, name: str, modules: Sequence[str]) -> Finding:
    leaves = _leaves(modules)
    near = difflib.get_close_matches(name, leaves, n=1, cutoff=0.5)
    allowed = f"the model has {', '.join(leaves)}"
    return Finding(key, f"no {name!r} here", allowed, f"{key}: {near[0] if near else '<module>'}")
