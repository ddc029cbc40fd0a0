"""The contract of an adapter: for every tensor that it changes, the keys, shapes and term.

It is derived from the adapter's configuration and the model by peft's rules. `changes` compares it
with the tensors of the adapter's file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

from tasks.weights.adapters.full_modules import (
    bias_pieces,
    embedding_pieces,
    saved_pieces,
    token_pieces,
)
from tasks.weights.adapters.pairs import module_pieces, parameter_pieces
from tasks.weights.adapters.piece import Ground, Piece, Shape
from tasks.weights.adapters.targets import targeted_modules, targeted_parameters


@dataclass(frozen=True)
class Contract(Ground):
    """All pieces of one adapter on one model.

    Attributes:
        pieces: the pieces, made from the attributes of `Ground`.
        findings: reasons why the adapter cannot be merged.
    """

    pieces: list[Piece] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        pieces, findings = self.pieces, self.findings
        modules = targeted_modules(self.config, self.live)
        for module in modules:
            pieces += module_pieces(self, module, findings)
        for module, names in targeted_parameters(self.config, self.live).items():
            pieces += parameter_pieces(self, module, names, findings)
        saved = saved_pieces(self)
        pieces += saved
        pieces += token_pieces(self, findings)
        pieces += bias_pieces(self, set(modules), {piece.target for piece in saved})
        pieces += embedding_pieces(self, {piece.stored for piece in pieces})
        findings += self._twice()

    def wanted(self) -> dict[str, Shape]:
        """Return the shape of every tensor that the adapter has to hold, by key."""
        return {key: shape for piece in self.pieces for key, shape in piece.wants.items()}

    def _twice(self) -> Iterator[str]:
        """Yield the tensors that two settings change; a wrapped layer may also store its weight."""
        target = attrgetter("target")
        for name, pieces in groupby(sorted(self.pieces, key=target), key=target):
            ways = [piece for piece in pieces if ".base_layer." not in piece.stored]
            if len(ways) > 1:
                keys = " and ".join(min(piece.wants) for piece in ways)
                yield f"{name}: changed twice, by {keys}"
