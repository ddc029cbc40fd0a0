"""4-bit layers that stay as they were loaded, on every CPU.

On a CPU with AVX-512 BF16, bitsandbytes 0.50.2 repacks a layer at its first forward pass in eval
mode that needs no gradient, and never turns back. From then on

- its scales are bf16, so that it computes with other weights than those that were loaded, and
  `state_dict` gives back others still (the scales are quantised again);
- its product passes no gradient on, and what lies below learns from wrong ones: one layer down in
  a Llama their cosine to the right ones is 0.5 to 0.9. torch warns that "an autograd kernel was not
  registered"; a layer with a bias ends in "a view of a leaf Variable ... in-place operation".

One evaluation before training is enough. What was trained is what is served only without that.
"""

from __future__ import annotations

from typing import Any

_REPACKS = "support_avx512bf16_for_cpu"
"""Attribute of `bitsandbytes.nn.Linear4bit` that the repacking asks for."""


def keep_as_loaded(model: Any) -> Any:
    """`model`, whose 4-bit layers will never be repacked. Call it before the first forward pass."""
    for module in model.modules():
        if hasattr(module, _REPACKS):
            setattr(module, _REPACKS, False)
    return model
