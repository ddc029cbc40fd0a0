"""Pieces of an adapter, each of which changes one tensor, and the data they are made from."""

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
        wants: shapes of the adapter tensors that it needs, by adapter key.
        term: change of the target; its operands are plain adapter keys. None for a replacement.
        stored: adapter key of the tensor that replaces the target; "" for none.
        alone: True if the target is tied and only this one of its names was trained.
    """

    target: str
    wants: Mapping[str, Shape]
    term: Term | None = None
    stored: str = ""
    alone: bool = False


@dataclass(frozen=True)
class Ground:
    """An adapter and its model: the data that pieces are made from.

    Attributes:
        config: configuration of the adapter.
        live: the model.
        file_tensors: tensors of the adapter's file, by key.
    """

    config: AdapterConfig
    live: LiveModel
    file_tensors: Mapping[str, TensorLike]

    def shape(self, name: str) -> Shape | None:
        """Return the shape of a live tensor; of a grown embedding, with the adapter's rows."""
        tensor = self.live.tensors.get(name)
        if tensor is None:
            return None
        module = name.removesuffix(".weight")
        if module in (self.live.input_embedding, self.live.output_embedding):
            for key in stored_keys(module):
                if key in self.file_tensors and len(self.file_tensors[key].shape) == 2:
                    return (self.file_tensors[key].shape[0], *tensor.shape[1:])
        return tuple(tensor.shape)

    def is_tied(self, name: str) -> bool:
        """Return True if a live tensor has more than one name."""
        return len(self.live.partners(name)) > 1

    def is_alone(self, name: str) -> bool:
        """Return True if a tensor is tied and its names were trained separately."""
        return self.is_tied(name) and not self.config.tying

    def stored(self, name: str, key: str, *, alone: bool) -> Piece:
        """Return the piece that replaces a live tensor by a full tensor of the adapter's file.

        Args:
            name: live name of the tensor.
            key: key in the adapter's file.
            alone: True if a tied tensor was trained under this name only.
        """
        wants = {key: self.shape(name) or ()}
        return Piece(name, wants, stored=key, alone=alone and self.is_alone(name))


def stored_keys(module: str) -> tuple[str, ...]:
    """Return the keys under which peft may store a full embedding."""
    infixes = ("", "base_layer.", "token_adapter.base_layer.")
    return tuple(f"{PEFT_PREFIX}{module}.{infix}weight" for infix in infixes)
