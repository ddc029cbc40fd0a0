"""Describe a model in memory as plain data: modules, their kinds, tensors, ties.

It has everything that PEFT's rules look at, and is made once from a model on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.core.contract import Expected

LINEAR, CONV1D, EMBEDDING, CONVOLUTION, OTHER = "linear", "conv1d", "embedding", "conv", "other"
"""Kinds of modules: "conv1d" is GPT-2's linear layer, weights (in, out); "conv" a convolution."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint that has another name in memory, or is a part of a tensor there.

    Attributes:
        shape: shape on disk.
        live: names of the tensors in memory that contain its elements.
        whole: True if it is exactly one tensor in memory, with the same elements in the same order.
    """

    shape: tuple[int, ...]
    live: tuple[str, ...]
    whole: bool


@dataclass(frozen=True)
class LiveModel:
    """A model in memory.

    Attributes:
        tensors: every parameter by its live name; a tied one under each of its names.
        modules: kind of every module, by name, in the model's order.
        tied: name of a tied parameter -> name of the parameter that it shares.
        transposed: modules with 3-D parameters of shape (experts, in, out).
        input_embedding: module name; "" if there is none.
        output_embedding: module name; "" if there is none, as in a reward model.
        stored: checkpoint tensors by key, where key and live name differ. These keys are the names
            that transformers 4 had in memory; see `legacy_names`.
    """

    tensors: Mapping[str, Expected]
    modules: Mapping[str, str]
    tied: Mapping[str, str]
    transposed: frozenset[str] = frozenset()
    input_embedding: str = ""
    output_embedding: str = ""
    stored: Mapping[str, Stored] = field(default_factory=dict)

    def partners(self, name: str) -> frozenset[str]:
        """Return all names of the parameter `name`, its own included."""
        holder = self.tied.get(name, name)
        return frozenset({holder, *(alias for alias, to in self.tied.items() if to == holder)})


def live_model(model: Any) -> LiveModel:
    """Describe a transformers model.

    Args:
        model: a `PreTrainedModel` without any wrapper; it may be on the meta device.
    """
    return LiveModel(
        tensors={
            name: Expected(name, tuple(tensor.shape))
            for name, tensor in model.named_parameters(remove_duplicate=False)
        },
        modules={name: _kind(module) for name, module in model.named_modules() if name},
        tied={str(k): str(v) for k, v in model.all_tied_weights_keys.items()},
        transposed=frozenset(
            name
            for name, module in model.named_modules()
            if getattr(module, "is_transposed", False)
        ),
        input_embedding=_name_of(model, model.get_input_embeddings()),
        output_embedding=_name_of(model, model.get_output_embeddings()),
    )


def _kind(module: Any) -> str:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    kinds = {
        nn.Linear: LINEAR,
        Conv1D: CONV1D,
        nn.Embedding: EMBEDDING,
        nn.Conv1d: CONVOLUTION,
        nn.Conv2d: CONVOLUTION,
        nn.Conv3d: CONVOLUTION,
    }
    return next((kind for cls, kind in kinds.items() if isinstance(module, cls)), OTHER)


def _name_of(model: Any, wanted: Any) -> str:
    if wanted is None:
        return ""
    return next((name for name, module in model.named_modules() if module is wanted), "")
