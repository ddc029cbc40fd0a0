"""Open a model's folder as a source of tensors, in any supported format."""

from __future__ import annotations

from pathlib import Path

from tasks.weights.files.source import Source
from tasks.weights.pickled.tensors import is_pickled_model, read_model
from tasks.weights.quantized.source import read_base


def open_model(root: Path) -> Source:
    """Open a full model, headers only: safetensors (plain or stored in 4 bits) or `.bin` files.

    Raises:
        ArtifactError: lists every finding of `read_base` or `read_model`.
    """
    return read_model(root) if is_pickled_model(root) else read_base(root)
