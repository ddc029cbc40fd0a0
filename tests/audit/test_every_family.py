"""Every family of transformers: what its class saves has no error, by headers and configuration.

Classes are built on the meta device in the sizes that they have by default, and their tensors are a
hole in a file.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from benchmarks.synthetic import write_hollow
from tasks.audit.finding import Severity
from tasks.audit.run import audit
from tasks.weights.families.conversion import default_layout
from tests.weights.adapters.making import quiet

HEADS = {"CAUSAL_LM": 140, "IMAGE_TEXT_TO_TEXT": 55, "SEQUENCE_CLASSIFICATION": 115}
"""And how many of their classes can be built with default sizes, at least."""
DEFAULTS = {"arcee": "TOKEN_ID_RANGE", "starcoder2": "TOKEN_ID_RANGE"}
"""Families whose default ids of special tokens are those of a larger vocabulary."""


def saved(head: str, root: Path) -> Iterator[tuple[str, Path]]:
    """Folders by `model_type`, each as it would be saved; gone when the next one is asked for."""
    mapping = getattr(transformers, f"MODEL_FOR_{head}_MAPPING")
    for kind in sorted(CONFIG_MAPPING):
        found = mapping.get(CONFIG_MAPPING[kind], ())
        for one in found if isinstance(found, tuple) else (found,):
            folder = root / f"{kind}-{one.__name__}"
            try:
                save(CONFIG_MAPPING[kind](), one, folder)
            except Exception:  # defaults that do not fit each other, libraries that are not here
                continue
            yield kind, folder
            shutil.rmtree(folder)


def save(config: Any, model_class: Any, folder: Path) -> None:
    with quiet():
        with torch.device("meta"):
            model = model_class._from_config(config, dtype=torch.bfloat16)
        shapes = default_layout(model)
        config.architectures, config.dtype = [model_class.__name__], "bfloat16"
        config.save_pretrained(folder)
    write_hollow(folder / "model.safetensors", shapes)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("head", HEADS)
def test_what_it_saves_has_no_error(head: str, tmp_path: Path) -> None:
    wrong, count = [], 0
    for kind, folder in saved(head, tmp_path):
        count += 1
        for one in audit(folder).findings:
            if one.severity is Severity.ERROR and one.code != DEFAULTS.get(kind):
                wrong.append(f"{folder.name}: {one.code} {one.where}: {one.found}; {one.expected}")
    assert wrong == []
    assert count >= HEADS[head]
