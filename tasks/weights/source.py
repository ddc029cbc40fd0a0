"""Sources: where tensors come from, whoever wrote the files.

A safetensors folder, the slices that ranks left, a DeepSpeed checkpoint and a pickled state dict
all answer the same two questions: what is there, and in which ranges of which files does it lie. So
one engine reads them all, and none of them is ever loaded whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tasks.contract import TensorLike


@dataclass(frozen=True)
class Extent:
    """`nbytes` bytes of a file from `start` on."""

    path: Path
    start: int
    nbytes: int


class Source(Protocol):
    """Tensors in files.

    Attributes:
        tensors: shape and dtype (safetensors name) by key.
    """

    @property
    def tensors(self) -> Mapping[str, TensorLike]: ...

    def extents(self, name: str) -> Sequence[Extent]:
        """The ranges that, one after the other, make the tensor's bytes, C order."""

    def sha256(self, name: str) -> str | None:
        """Of the tensor's bytes, where a manifest that can be trusted tells; else None."""


@dataclass(frozen=True)
class Renamed:
    """A source under other keys.

    Attributes:
        whole: the source itself.
        names: its key, by the key here; tensors that are not named are not there.
    """

    whole: Source
    names: Mapping[str, str]

    @property
    def tensors(self) -> Mapping[str, TensorLike]:
        """Shape and dtype by the key here."""
        return {key: self.whole.tensors[name] for key, name in self.names.items()}

    def extents(self, name: str) -> Sequence[Extent]:
        """As the whole says."""
        return self.whole.extents(self.names[name])

    def sha256(self, name: str) -> str | None:
        """As the whole says."""
        return self.whole.sha256(self.names[name])
