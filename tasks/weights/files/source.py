"""The interface of a source of tensors, whatever the format of its files.

A safetensors folder, the partitions of ranks, a DeepSpeed checkpoint and a pickled state dict all
tell which tensors they hold and in which ranges of which files. So one engine reads them all, and
never loads one as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tasks.core.contract import TensorLike


@dataclass(frozen=True)
class Extent:
    """A range of a file: `nbytes` bytes from byte `start` on."""

    path: Path
    start: int
    nbytes: int


@dataclass(frozen=True)
class FullTensor:
    """A full tensor: shape, dtype (safetensors name), and its byte ranges in order."""

    shape: tuple[int, ...]
    dtype: str
    extents: tuple[Extent, ...]


class Source(Protocol):
    """Tensors in files.

    Attributes:
        tensors: shape and dtype (safetensors name) by key.
    """

    @property
    def tensors(self) -> Mapping[str, TensorLike]: ...

    def extents(self, name: str) -> Sequence[Extent]:
        """Return the ranges that, concatenated, are the tensor's bytes in C order."""

    def checksum(self, name: str) -> str | None:
        """Return the BLAKE3 hash of the tensor's bytes; None if no trusted manifest states it."""


@dataclass(frozen=True)
class Renamed:
    """A source with other keys, or with some of its tensors only.

    Attributes:
        whole: the original source.
        names: original key by new key; tensors without a new key are left out.
        tensors: shape and dtype by new key.
    """

    whole: Source
    names: Mapping[str, str]
    tensors: Mapping[str, TensorLike] = field(init=False)

    def __post_init__(self) -> None:
        tensors = {key: self.whole.tensors[name] for key, name in self.names.items()}
        object.__setattr__(self, "tensors", tensors)

    def extents(self, name: str) -> Sequence[Extent]:
        """Return the ranges of the original tensor."""
        return self.whole.extents(self.names[name])

    def checksum(self, name: str) -> str | None:
        """Return the hash of the original tensor, if it is known."""
        return self.whole.checksum(self.names[name])


def info_of(name: str, sources: Mapping[str, Source]) -> TensorLike:
    """Return shape and dtype of the tensor "<input>:<key>", which must exist."""
    source, _, key = name.partition(":")
    return sources[source].tensors[key]


def extents_of(name: str, sources: Mapping[str, Source]) -> Sequence[Extent]:
    """Return the byte ranges of the tensor "<input>:<key>", which must exist."""
    source, _, key = name.partition(":")
    return sources[source].extents(key)


def find(name: str, sources: Mapping[str, Source]) -> TensorLike | str:
    """Look up a tensor.

    Args:
        name: name of the tensor, "<input>:<key>".
        sources: sources by input name.

    Returns:
        the tensor; or, if there is none, a text that says why.
    """
    source, _, key = name.partition(":")
    if source not in sources:
        return f"{name}: no input {source!r} (inputs: {', '.join(sources) or 'none'})"
    tensor = sources[source].tensors.get(key)
    return f"{source} has no {key}" if tensor is None else tensor
