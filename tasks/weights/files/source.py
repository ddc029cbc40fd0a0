"""Sources: where tensors come from, whoever wrote the files.

A safetensors folder, the slices that ranks left, a DeepSpeed checkpoint and a pickled state dict
all answer the same two questions: what is there, and in which ranges of which files does it lie. So
one engine reads them all, and none of them is ever loaded whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tasks.core.contract import TensorLike


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
        tensors: shape and dtype by the key here.
    """

    whole: Source
    names: Mapping[str, str]
    tensors: Mapping[str, TensorLike] = field(init=False)

    def __post_init__(self) -> None:
        held = {key: self.whole.tensors[name] for key, name in self.names.items()}
        object.__setattr__(self, "tensors", held)

    def extents(self, name: str) -> Sequence[Extent]:
        """As the whole says."""
        return self.whole.extents(self.names[name])

    def sha256(self, name: str) -> str | None:
        """As the whole says."""
        return self.whole.sha256(self.names[name])


def find(name: str, sources: Mapping[str, Source]) -> TensorLike | str:
    """The tensor that "<input>:<key>" names, or why there is none."""
    source, _, key = name.partition(":")
    if source not in sources:
        return f"{name}: no input {source!r} (inputs: {', '.join(sources) or 'none'})"
    found = sources[source].tensors.get(key)
    return f"{source} has no {key}" if found is None else found
