"""A piece: what of an adapter changes one tensor, and the ground on which pieces are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tasks.core.contract import TensorLike
from tasks.weights.adapters.config import AdapterConfig
from tasks.weights.adapters.live import LiveModel
from tasks.weights.files.names import PEFT_PREFIX
from tasks.weights.plan.adapter_ops import Term

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """The part of an adapter that changes one live tensor.

    Attributes:
        target: live name of the tensor.
        wants: shape by adapter key.
        term: what the tensors do to the target; its operands are plain adapter keys.
        stored: adapter key of the tensor that takes the target's place; "" for none.
        alone: where the target is tied to another tensor, only this name of it was trained.
    """

    target: str
    wants: Mapping[str, Shape]
    term: Term | None = None
    stored: str = ""
    alone: bool = False


@dataclass(frozen=True)
class Ground:
    """What pieces are made from.

    Attributes:
        config: the adapter's.
        live: the model.
        held: the tensors that the adapter's file holds, by key.
    """

    config: AdapterConfig
    live: LiveModel
    held: Mapping[str, TensorLike]

    def shape(self, name: str) -> Shape | None:
        """Shape of a live tensor; with as many rows as are stored, for a grown embedding."""
        tensor = self.live.tensors.get(name)
        if tensor is None:
            return None
        module = name.removesuffix(".weight")
        if module in (self.live.input_embedding, self.live.output_embedding):
            for key in stored_keys(module):
                if key in self.held and len(self.held[key].shape) == 2:
                    return (self.held[key].shape[0], *tensor.shape[1:])
        return tuple(tensor.shape)

    def is_tied(self, name: str) -> bool:
        """Whether a live tensor has more than one name."""
        return len(self.live.partners(name)) > 1

    def is_alone(self, name: str) -> bool:
        """Whether a change of a tied tensor was trained for this one of its names only."""
        return self.is_tied(name) and not self.config.tying

    def stored(self, name: str, key: str, *, alone: bool) -> Piece:
        """A tensor that the adapter's file holds whole, under `key`."""
        wants = {key: self.shape(name) or ()}
        return Piece(name, wants, stored=key, alone=alone and self.is_alone(name))


def stored_keys(module: str) -> tuple[str, ...]:
    """Keys under which peft may store an embedding whole."""
    infixes = ("", "base_layer.", "token_adapter.base_layer.")
    return tuple(f"{PEFT_PREFIX}{module}.{infix}weight" for infix in infixes)
