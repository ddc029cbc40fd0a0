"""Inputs by reference: what another process needs to open the same sources."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from tasks.weights.partitions import read_partitions
from tasks.weights.reader import WEIGHTS, open_checkpoint
from tasks.weights.source import Source
from tasks.weights.stored4bit.source import open_base

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


@contextlib.contextmanager
def open_sources(refs: Mapping[str, SourceRef]) -> Iterator[dict[str, Source]]:
    """Open inputs by name. Raises ArtifactError."""
    with contextlib.ExitStack() as stack:
        found: dict[str, Source] = {}
        for name, ref in refs.items():
            if ref.kind == "partitions":
                found[name] = read_partitions(ref.path)
            elif ref.kind == "base":
                found[name] = stack.enter_context(open_base(ref.path))
            else:
                found[name] = stack.enter_context(open_checkpoint(ref.path, ref.stem))
        yield found
