"""Checkpoints that classes of transformers save have no errors, by headers and configuration.

Classes are built on the meta device in their default sizes; their weight files are sparse.
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
from tasks.audit.check import Severity
from tasks.audit.run import audit
from tasks.weights.mapping import default_layout
from tests.weights.making import quiet

HEADS = {"CAUSAL_LM": 140, "IMAGE_TEXT_TO_TEXT": 55, "SEQUENCE_CLASSIFICATION": 115}
"""Heads, and the least number of classes that can be built with default sizes."""
DEFAULTS = {"arcee": "TOKEN_UNKNOWN", "starcoder2": "TOKEN_UNKNOWN"}
"""Families whose default special token ids belong to a larger vocabulary."""
HOLLOW = "PICKLE_CALLS"
"""Zeros have no line end, at which a pickle that begins like such a header would be damaged."""


def saved(head: str, root: Path) -> Iterator[tuple[str, Path]]:
    """Yield `model_type` and folder of each saved class; each folder is deleted after use."""
    mapping = getattr(transformers, f"MODEL_FOR_{head}_MAPPING")
    for kind in sorted(CONFIG_MAPPING):
        classes = mapping.get(CONFIG_MAPPING[kind], ())
        for model_class in classes if isinstance(classes, tuple) else (classes,):
            folder = root / f"{kind}-{model_class.__name__}"
            try:
                save(CONFIG_MAPPING[kind](), model_class, folder)
            except Exception:  # incompatible defaults, missing libraries
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
def test_saved_checkpoints_have_no_errors(head: str, tmp_path: Path) -> None:
    wrong, count = [], 0
    for kind, folder in saved(head, tmp_path):
        count += 1
        for finding in audit(folder, values=False).findings:  # the files are hollow
            ignored = finding.code in (HOLLOW, DEFAULTS.get(kind))
            if finding.severity is Severity.ERROR and not ignored:
                details = f"{finding.found}; {finding.expected}"
                wrong.append(f"{folder.name}: {finding.code} {finding.where}: {details}")
    assert wrong == []
    assert count >= HEADS[head]
