"""Tiny models of several families, and faults that are planted in one of their modules."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from tasks.bisect.calls import places
from tasks.bisect.folders import compare_folders
from tasks.bisect.report import Report
from tasks.bisect.run import Options
from tasks.evaluation.scoring import ModelRef
from tests.tiny import tiny

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "LlamaForCausalLM", {"num_hidden_layers": 4}),
    "qwen2": ("Qwen2", "Qwen2ForCausalLM", {"num_hidden_layers": 4, "tie_word_embeddings": False}),
    "gpt2": ("GPT2", "GPT2LMHeadModel", {"num_hidden_layers": 3}),
    "mixtral": ("Mixtral", "MixtralForCausalLM", {"num_hidden_layers": 3, "num_local_experts": 4}),
}
"""Configuration, class and changes: plain, with biases, tied with fused layers, with experts."""
IDS = [random.Random(seed).choices(range(3, 96), k=20) for seed in range(4)]
KINDS = ("other", "transposed", "scaled", "zero", "swapped")


def make(family: str, seed: int, *, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """Return a model whose layers all matter, unlike fresh ones."""
    import transformers

    config, kind, own = FAMILIES[family]
    torch.manual_seed(seed)
    model = getattr(transformers, kind)(tiny(config, **{**own, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                fan_in = parameter.shape[-2 if family == "gpt2" and ".h." in name else -1]
                parameter.normal_(std=1.5 / fan_in**0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype)


def plant(model: Any, other: Any, kind: str, chooser: random.Random) -> tuple[str, str]:
    """Plant a fault in a random tensor. Returns the names of its module and of the tensor.

    Args:
        model: gets the fault.
        other: another model of the same shapes.
        kind: one of `KINDS`.
        chooser: chooses the tensor.
    """
    tensors = [
        (place, name, parameter)
        for place, module in places(model).items()
        for name, parameter in module.named_parameters(recurse=False)
        if _suits(kind, place, parameter)
    ]
    place, name, parameter = chooser.choice(tensors)
    with torch.no_grad():
        if kind == "other":
            parameter.copy_(places(other)[place].get_parameter(name))
        elif kind == "transposed":
            parameter.copy_(parameter.T.clone())
        elif kind == "scaled":
            parameter.mul_(chooser.choice((0.5, 1.5, 2.0)))
        elif kind == "zero":
            parameter.zero_()
        else:
            heads = list(parameter.reshape(-1, 8, parameter.shape[-1]).unbind(0))
            parameter.copy_(torch.cat([*heads[1:], heads[0]]))
    return place, name


def _suits(kind: str, place: str, parameter: Any) -> bool:
    if kind == "transposed":
        return parameter.dim() == 2 and parameter.shape[0] == parameter.shape[1]
    if kind == "swapped":
        return place.endswith(("q_proj", "k_proj", "v_proj")) and parameter.dim() == 2
    return parameter.dim() > 1 or kind != "scaled"


def quantised(value: torch.Tensor, bits: str, block: int) -> torch.Tensor:
    """Round to a format with one scale for `block` numbers of a row."""
    parts = value.reshape(-1, block)
    top = parts.abs().amax(1, keepdim=True)
    if bits == "fp8":
        rounded = (parts / top * 448).to(torch.float8_e4m3fn).float() * top / 448
    else:
        most = 127 if bits == "int8" else 7
        rounded = (parts / top * most).round() * top / most
    return rounded.reshape(value.shape)


def examine(
    a: Path,
    b: Path,
    *,
    dtypes: tuple[str, str] = ("bfloat16", "bfloat16"),
    adapter: Path | None = None,
) -> Report:
    """Bisect two folders in this process, on `IDS`; `adapter` lies on top of a."""
    first = ModelRef(a, adapter, dtype=dtypes[0], device="cpu")
    second = ModelRef(b, dtype=dtypes[1], device="cpu")
    report = compare_folders(first, second, Options(ids=IDS), None)
    assert report.text()
    return report
