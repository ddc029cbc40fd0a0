"""The contract of an adapter: for every tensor that it changes, the keys, shapes and term.

It is derived from the adapter's configuration and the model by peft's rules. `changes` compares it
with the tensors of the adapter's file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from tasks.core.contract import TensorLike
from tasks.weights.adapters.config import AdapterConfig
from tasks.weights.adapters.full_modules import (
    bias_pieces,
    embedding_pieces,
    saved_pieces,
    token_pieces,
)
from tasks.weights.adapters.live import LiveModel
from tasks.weights.adapters.pairs import module_pieces, parameter_pieces
from tasks.weights.adapters.piece import Ground, Piece, Shape
from tasks.weights.adapters.targets import targeted_modules, targeted_parameters


@dataclass
class Contract:
    """All pieces of one adapter on one model.

    Attributes:
        config: configuration of the adapter.
        live: the model.
        file_tensors: tensors of the adapter's file, by key.
        pieces: the pieces, made from the attributes above.
        findings: reasons why the adapter cannot be merged.
    """

    config: AdapterConfig
    live: LiveModel
    file_tensors: Mapping[str, TensorLike]
    pieces: list[Piece] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        ground = Ground(self.config, self.live, self.file_tensors)
        modules = targeted_modules(self.config, self.live)
        for module in modules:
            self.pieces += module_pieces(ground, module, self.findings)
        for module, names in targeted_parameters(self.config, self.live).items():
            self.pieces += parameter_pieces(ground, module, names, self.findings)
        saved = saved_pieces(ground)
        self.pieces += saved
        self.pieces += token_pieces(ground, self.findings)
        self.pieces += bias_pieces(ground, set(modules), {piece.target for piece in saved})
        self.pieces += embedding_pieces(ground, {piece.stored for piece in self.pieces})
        self.findings += self._twice()

    def wanted(self) -> dict[str, Shape]:
        """Return the shape of every tensor that the adapter has to hold, by key."""
        return {key: shape for piece in self.pieces for key, shape in piece.wants.items()}

    def _twice(self) -> Iterator[str]:
        """Yield the tensors that two settings change; a wrapped layer may also store its weight."""
        for name, pieces in groupby(sorted(self.pieces, key=_target), key=_target):
            ways = [piece for piece in pieces if ".base_layer." not in piece.stored]
            if len(ways) > 1:
                keys = " and ".join(min(piece.wants) for piece in ways)
                yield f"{name}: changed twice, by {keys}"


def _target(piece: Piece) -> str:
    return piece.target
