"""Modules of a base model, by its headers: which it has, and the sizes of their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tasks.audit.checks.adapters.adapter_keys import tail_of
from tasks.audit.checks.text.embeddings import Embeddings, embeddings_of
from tasks.audit.source import Source
from tasks.weights.quantized.config_fields import stored

_TIED = ("lm_head", "embed_out")
"""Names in memory of what is not on disk where it is tied."""


@dataclass(frozen=True)
class Base:
    """What a base says of itself by its headers.

    Attributes:
        modules: shape of the weight of every module, by its name on disk.
        tails: the same by the part of the name that wrapping a model keeps; None where two
            modules share it, or it has parameters of other names.
        embeddings: its embeddings.
        plain: whether its weights lie there as they are, and not packed.
    """

    modules: Mapping[str, tuple[int, ...]]
    tails: Mapping[str, tuple[int, ...] | None]
    embeddings: Embeddings
    plain: bool

    def shape_of(self, module: str) -> tuple[int, ...] | None:
        """Shape of a module's weight; None where it is not known for certain."""
        return self.modules.get(module) or self.tails.get(tail_of(module))

    def has(self, module: str) -> bool:
        """Whether it has such a module, under that name or within another model."""
        tail = tail_of(module)
        tied = not self.embeddings.output and tail in _TIED
        return module in self.modules or tail in self.tails or tied


def read_base(source: Source) -> Base:
    """A base by the shapes of its tensors."""
    modules: dict[str, tuple[int, ...]] = {}
    tails: dict[str, tuple[int, ...] | None] = {}
    others: set[str] = set()
    for key, held in source.tensors.items():
        module, _, part = key.rpartition(".")
        if part == "weight":
            modules[module], tail = held.shape, tail_of(module)
            tails[tail] = held.shape if tail not in tails else None
        else:
            others.add(tail_of(module))
    embeddings = embeddings_of(source.tensors, source.config())
    tails = {**dict.fromkeys(others), **tails}
    return Base(modules, tails, embeddings, plain=stored(source.config()) is None)
