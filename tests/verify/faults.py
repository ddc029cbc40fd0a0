"""Files as they are after a mistake: adapters and bases that differ from what was trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from benchmarks.verify import ADAPTER, Tensors, altered, mixed


def adapters(lora: Path, another: Path, folder: Path) -> dict[str, Path]:
    """Write the faulty versions of an adapter. Returns their folders by name."""
    other = load_file(another / ADAPTER)

    def one_layer(tensors: Tensors) -> Tensors:
        return {name: other[name] for name in tensors if ".layers.1." in name}

    return {
        "zeros": mixed(lora, folder / "zeros", 0.0),
        "half": mixed(lora, folder / "half", 0.5),
        "one-layer": altered(lora, folder / "one-layer", one_layer),
        "step-before": lora / "checkpoint-2",
    }


def _base(models: Path, out: Path) -> Path:
    shutil.copytree(models / "base", out)
    return out


def _edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(path.read_text()) if path.is_file() else {}
    change(document)
    path.write_text(json.dumps(document, indent=1))


def other_rope(models: Path, out: Path) -> Path:
    """Copy the base with another base frequency of its rotary embedding."""

    def change(config: dict[str, Any]) -> None:
        config.pop("rope_theta", None)
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}

    _edit(_base(models, out) / "config.json", change)
    return out


def without_eos(models: Path, out: Path) -> Path:
    """Copy the base so that no file names the token that ends a turn."""
    _base(models, out)
    end = "<|endoftext|>"
    number = _token(out, end)
    _edit(out / "config.json", lambda config: config.update(eos_token_id=number))
    _edit(out / "generation_config.json", lambda config: config.update(eos_token_id=number))
    _edit(out / "tokenizer_config.json", lambda config: config.update(eos_token=end))
    (out / "special_tokens_map.json").unlink(missing_ok=True)
    return out


def rounded_to_fp8(models: Path, out: Path) -> Path:
    """Copy the base with linear weights that were rounded to float8 e4m3, one scale per tensor."""
    import torch
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file as save

    _base(models, out)
    (path,) = out.glob("*.safetensors")
    tensors = load(path)
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            scale = tensor.abs().max() / 448.0
            tensors[name] = ((tensor / scale).to(torch.float8_e4m3fn).to(tensor.dtype)) * scale
    save(tensors, path, metadata={"format": "pt"})
    return out


def other_tokenizer(out: Path) -> Path:
    """Write the tokenizer of another model: the same size, learnt from other texts."""
    from tasks.toy.tokenizer import train_tokenizer

    words = ("zebra", "quartz", "vortex", "fjord", "glyph", "nymph", "waltz", "jukebox")
    texts = [f"{a} {b} {a}{b}" for a in words for b in words] * 4
    train_tokenizer(texts, context=512).save_pretrained(out)
    return out


def _token(folder: Path, text: str) -> int:
    document = json.loads((folder / "tokenizer.json").read_text())
    return next(entry["id"] for entry in document["added_tokens"] if entry["content"] == text)
