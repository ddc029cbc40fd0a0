"""Layers that bitsandbytes' CPU kernels hold wrongly in 4 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.preflight.finding import Finding

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
