"""Keep bitsandbytes from repacking 4-bit layers on CPUs.

On a CPU with AVX-512 BF16, bitsandbytes 0.50.2 repacks a layer at its first forward pass in eval
mode without gradients, and never undoes it. From then on

- its scales are bf16, so it computes with other weights than were loaded, and `state_dict` returns
  yet others (the scales are quantized again);
- its product passes no gradient on, so the layers below get wrong gradients: one layer down in a
  Llama their cosine with the right ones is 0.5 to 0.9. torch warns that "an autograd kernel was not
  registered"; a layer with a bias fails with "a view of a leaf Variable ... in-place operation".

One evaluation before training is enough to trigger it, and the trained model is then not the served
one.
"""

from __future__ import annotations

from typing import Any

_REPACKS = "support_avx512bf16_for_cpu"
"""Attribute of `bitsandbytes.nn.Linear4bit` that enables repacking."""


def keep_as_loaded(model: Any) -> Any:
    """Disable repacking of a model's 4-bit layers and return the model.

    Call it before the first forward pass.
    """
    for module in model.modules():
        if hasattr(module, _REPACKS):
            setattr(module, _REPACKS, False)
    return model
