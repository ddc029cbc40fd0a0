"""Opening inputs: a full model's folder whatever it is stored in; sources by reference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from tasks.weights.files.reader import WEIGHTS, read_checkpoint
from tasks.weights.files.source import Source
from tasks.weights.pickled.state import is_pickled_model, read_model
from tasks.weights.plan.partitions import read_partitions
from tasks.weights.quantized.source import read_base

Kind = Literal["checkpoint", "base", "partitions"]


@dataclass(frozen=True)
class SourceRef:
    """Where a source lies and how it is read.

    Attributes:
        path: its folder.
        kind: "checkpoint" for safetensors files, "base" for those of a model that may be packed in
            4 bits, "partitions" for the slices of our ranks.
        stem: of the safetensors files: "model", "adapter_model".
    """

    path: Path
    kind: Kind = "checkpoint"
    stem: str = WEIGHTS

    def as_json(self) -> dict[str, str]:
        """Plain JSON."""
        return {**asdict(self), "path": str(self.path)}

    @classmethod
    def from_json(cls, raw: Mapping[str, str]) -> SourceRef:
        """What `as_json` made."""
        kinds: dict[str, Kind] = {one: one for one in get_args(Kind)}
        return cls(Path(raw["path"]), kinds[raw["kind"]], raw["stem"])


def open_model(root: Path) -> Source:
    """A full model's tensors, headers only: safetensors, plain or packed in 4 bits, or `.bin`.

    Raises:
        ArtifactError: with every finding, as of `read_base` and `read_model`.
    """
    return read_model(root) if is_pickled_model(root) else read_base(root)


@contextlib.contextmanager
def open_sources(refs: Mapping[str, SourceRef]) -> Iterator[dict[str, Source]]:
    """Open inputs by name. Raises ArtifactError."""
    found: dict[str, Source] = {}
    for name, ref in refs.items():
        if ref.kind == "partitions":
            found[name] = read_partitions(ref.path)
        elif ref.kind == "base":
            found[name] = read_base(ref.path)
        else:
            found[name] = read_checkpoint(ref.path, ref.stem)
    yield found
