"""Compare a model with its quantised version, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from tasks.serving.reference.load import input_device


@torch.no_grad()
def layer_errors(
    original: Any, quantized: Any, rows: Sequence[Sequence[int]]
) -> list[tuple[str, float]]:
    """Return the relative error of each quantised layer's outputs, the largest first.

    The error of a layer is sqrt(sum |y' - y|^2 / sum |y|^2) over all tokens. Both layers get the
    original model's inputs, so that an error is blamed on the layer that makes it and not on those
    after it.

    Args:
        original: a causal model by transformers, in eval mode.
        quantized: its version, from a compressed-tensors folder or from a GGUF file.
        rows: token ids of each row.
    """
    named = dict(quantized.named_modules())
    layers = {
        name: module
        for name, module in named.items()
        if getattr(module, "quantization_scheme", None) is not None
    }
    if not layers:  # from GGUF, where every linear layer is quantised and already decoded
        layers = {name: m for name, m in named.items() if isinstance(m, torch.nn.Linear)}
    device = input_device(quantized)
    quantized(torch.tensor([list(rows[0][:2])], device=device))  # decompresses the weights
    sums = {name: [0.0, 0.0] for name in layers}
    modules = dict(original.named_modules())
    hooks = [
        modules[name].register_forward_hook(partial(_add, layer, sums[name]))
        for name, layer in layers.items()
    ]
    for row in rows:
        original(torch.tensor([list(row)], device=input_device(original)))
    for hook in hooks:
        hook.remove()
    errors = {name: (lost / max(total, 1e-30)) ** 0.5 for name, (lost, total) in sums.items()}
    return sorted(errors.items(), key=lambda item: -item[1])


def _add(layer: Any, sums: list[float], _: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Add the squared error and the squared size of one layer's outputs to `sums`."""
    exact = output.float()
    changed = layer(*(x.to(layer.weight.device) for x in inputs)).to(exact.device).float()
    sums[0] += float((changed - exact).square().sum())
    sums[1] += float(exact.square().sum())
