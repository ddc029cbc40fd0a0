"""Open the sources of a plan: a model's folder in any supported format, or a stored reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tasks.weights.files.reader import WEIGHTS, read_checkpoint
from tasks.weights.files.source import Source
from tasks.weights.pickled.state import is_pickled_model, read_model
from tasks.weights.plan.partitions import read_partitions
from tasks.weights.quantized.source import read_base

Kind = Literal["checkpoint", "base", "partitions"]


@dataclass(frozen=True)
class SourceRef:
    """Folder and format of a source.

    Attributes:
        path: its folder.
        kind: "checkpoint" for safetensors files, "base" for safetensors files of a model that may
            be stored in 4 bits, "partitions" for the partitions that our ranks wrote.
        stem: start of the safetensors files' names: "model", "adapter_model".
    """

    path: Path
    kind: Kind = "checkpoint"
    stem: str = WEIGHTS


def open_model(root: Path) -> Source:
    """Open a full model, headers only: safetensors (plain or stored in 4 bits) or `.bin` files.

    Raises:
        ArtifactError: lists every finding of `read_base` or `read_model`.
    """
    return read_model(root) if is_pickled_model(root) else read_base(root)


def open_sources(refs: Mapping[str, SourceRef]) -> dict[str, Source]:
    """Open sources by name. Raises ArtifactError."""
    sources: dict[str, Source] = {}
    for name, ref in refs.items():
        if ref.kind == "partitions":
            sources[name] = read_partitions(ref.path)
        elif ref.kind == "base":
            sources[name] = read_base(ref.path)
        else:
            sources[name] = read_checkpoint(ref.path, ref.stem)
    return sources
