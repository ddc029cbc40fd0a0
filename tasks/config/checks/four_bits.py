"""Bases that QLoRA cannot hold in 4 bits: odd widths on a CPU, merged QLoRA models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.config.checks.finding import Finding
from tasks.core.errors import ArtifactError
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.quantized.nf4 import LOST_ALLOWED, LOST_OVERRIDE, lost_in_4_bits

BLOCK = 64
"""Weights that share a scale."""
_WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size")


def widths(kind: str, config: Mapping[str, Any], *, gpu: bool) -> list[Finding]:
    """QLoRA on a CPU where a linear layer's input is no whole number of blocks.

    bitsandbytes 0.50.2 takes wrong scales there (its AVX-512 kernel), so that what is trained is
    neither the base nor what is merged and served.
    """
    if kind != "qlora" or gpu:
        return []
    text = config.get("text_config") or config
    found = [f"{name}={text[name]}" for name in _WIDTHS if (text.get(name) or 0) % BLOCK]
    if not found:
        return []
    allowed = f"on a CPU bitsandbytes needs multiples of {BLOCK}: other rows get wrong scales"
    return [Finding("peft.kind", f"qlora, and {', '.join(found)}", allowed, "peft=lora")]


def merged(kind: str, folder: Path) -> list[Finding]:
    """QLoRA on a merged QLoRA model, whose 4 bits are those from before that training.

    A folder that cannot be read is named by the other checks.
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
