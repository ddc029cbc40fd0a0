"""Bases as they are after a mistake: they differ from what was trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


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


def _token(folder: Path, text: str) -> int:
    document = json.loads((folder / "tokenizer.json").read_text())
    return next(entry["id"] for entry in document["added_tokens"] if entry["content"] == text)
