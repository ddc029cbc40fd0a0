"""A model folder made to crash its reader is reported like a broken download."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.weights.files.folder import INDEX, inspect_checkpoint


def problems(folder: Path) -> list[str]:
    (folder / "tokenizer.json").write_text("{}")
    return inspect_checkpoint(folder).problems


@pytest.mark.parametrize("name", ["x" * 1000, "\ud800", "x\0y", "../x", "..", ""])
def test_an_index_with_impossible_file_names(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    assert problems(tmp_path) == [f"{INDEX} points outside the folder: {name[:200]!r}"]


@pytest.mark.parametrize("file", ["config.json", INDEX])
def test_deeply_nested_json(tmp_path: Path, file: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    (tmp_path / file).write_text('{"a":' + "[" * 100_000)
    assert f"{file}: not JSON: nested too deep" in problems(tmp_path)
