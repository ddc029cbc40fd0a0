"""The adapter's contract: for every tensor that it changes, which keys, which shapes, which term.

It is made from the adapter's configuration and the model: what peft would have written for them.
`checking` compares it with what the file holds.
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
    """All pieces of one adapter on one model, and what cannot be.

    Attributes:
        config: the adapter's.
        live: the model.
        held: the tensors that the adapter's file holds, by key.
    """

    config: AdapterConfig
    live: LiveModel
    held: Mapping[str, TensorLike]
    pieces: list[Piece] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        ground = Ground(self.config, self.live, self.held)
        modules = targeted_modules(self.config, self.live)
        for module in modules:
            self.pieces += module_pieces(ground, module, self.findings)
        for module, names in targeted_parameters(self.config, self.live).items():
            self.pieces += parameter_pieces(ground, module, names, self.findings)
        saved = saved_pieces(ground)
        self.pieces += saved
        self.pieces += token_pieces(ground, self.findings)
        self.pieces += bias_pieces(ground, set(modules), {one.target for one in saved})
        self.pieces += embedding_pieces(ground, {piece.stored for piece in self.pieces})
        self.findings += self._twice()

    def wanted(self) -> dict[str, Shape]:
        """Shape of every tensor that the adapter has to hold, by key."""
        return {key: shape for piece in self.pieces for key, shape in piece.wants.items()}

    def _twice(self) -> Iterator[str]:
        """Tensors that two settings change; only a wrapped layer's own weight may be stored too."""
        for name, pieces in groupby(sorted(self.pieces, key=_target), key=_target):
            ways = [one for one in pieces if ".base_layer." not in one.stored]
            if len(ways) > 1:
                yield f"{name}: changed twice, by {' and '.join(min(one.wants) for one in ways)}"


def _target(piece: Piece) -> str:
    return piece.target
