"""Train adapters with peft, save them as peft does, and damage copies of them."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence peft's warnings about settings that these tests use on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def train(model: Any, config: Any, *, seed: int = 1) -> Any:
    """Wrap a copy of the model with peft and change every trained weight, as training would."""
    from peft import get_peft_model

    torch.manual_seed(seed)
    with quiet():
        wrapped = get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for name, tensor in wrapped.named_parameters():
            if "lora_magnitude" in name:
                tensor.mul_(1 + 0.2 * torch.rand_like(tensor))
            elif "lora_" in name:
                tensor.copy_(torch.randn_like(tensor) * 0.1)
            elif tensor.requires_grad:
                tensor.add_(torch.randn_like(tensor) * 0.1)
    return wrapped.eval()


def save(wrapped: Any, folder: Path, **options: Any) -> Path:
    """Save an adapter as peft does."""
    with quiet():
        wrapped.save_pretrained(folder, **options)
    return folder


def altered(
    good: Path, to: Path, edit: Callable[[Tensors], Any] = id, config: dict[str, Any] | None = None
) -> Path:
    """Copy an adapter with edited tensors and replaced settings."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(good, to)
    tensors = load_file(good / "adapter_model.safetensors")
    edit(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, to / "adapter_model.safetensors")
    raw = json.loads((to / "adapter_config.json").read_text())
    (to / "adapter_config.json").write_text(json.dumps({**raw, **(config or {})}))
    return to
