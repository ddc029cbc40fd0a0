"""The model in memory, as far as PEFT's rules look at it: modules, their kinds, tensors, ties.

Made once from a model on the meta device, by a process that has transformers; plain data from then
on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tasks.core.contract import Expected

LINEAR, CONV1D, EMBEDDING, CONVOLUTION, OTHER = "linear", "conv1d", "embedding", "conv", "other"
"""Kinds of modules: `conv1d` is GPT-2's linear layer with its weight stored (in, out); `conv` is a
real convolution."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint that has another name in memory, or is only a part of one there.

    Attributes:
        shape: on disk.
        live: names of the tensors in memory that it makes, or helps to make.
        whole: it is all of one tensor in memory, element by element.
    """

    shape: tuple[int, ...]
    live: tuple[str, ...]
    whole: bool


@dataclass(frozen=True)
class LiveModel:
    """What a model looks like in memory.

    Attributes:
        tensors: every parameter by its live name, tied ones under each of their names.
        modules: kind of every module, by name, in the model's order.
        tied: name of a parameter that is the same as another one -> that one's name.
        transposed: modules whose 3-D parameters are stored (experts, in, out).
        input_embedding: module name; "" when there is none.
        output_embedding: module name; "" when there is none, as in a reward model.
        stored: what a checkpoint's keys are in memory, by key, where the two differ. Those keys are
            the names that older versions of transformers had in memory: see `older`.
    """

    tensors: Mapping[str, Expected]
    modules: Mapping[str, str]
    tied: Mapping[str, str]
    transposed: frozenset[str] = frozenset()
    input_embedding: str = ""
    output_embedding: str = ""
    stored: Mapping[str, Stored] = field(default_factory=dict)

    def partners(self, name: str) -> frozenset[str]:
        """All names that the parameter `name` has, its own included."""
        holder = self.tied.get(name, name)
        return frozenset({holder, *(alias for alias, to in self.tied.items() if to == holder)})

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            **asdict(self),
            "tensors": [asdict(one) for one in self.tensors.values()],
            "transposed": sorted(self.transposed),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> LiveModel:
        """What `as_json` made, or what JSON made of that."""
        tensors = [
            Expected(one["name"], tuple(one["shape"]), one["dtype"]) for one in raw["tensors"]
        ]
        return cls(
            tensors={one.name: one for one in tensors},
            modules=dict(raw["modules"]),
            tied=dict(raw["tied"]),
            transposed=frozenset(raw["transposed"]),
            input_embedding=str(raw["input_embedding"]),
            output_embedding=str(raw["output_embedding"]),
            stored={
                key: Stored(tuple(one["shape"]), tuple(one["live"]), one["whole"])
                for key, one in raw["stored"].items()
            },
        )


def live_model(model: Any, dtype: str | None = None) -> LiveModel:
    """Describe a transformers model; on the meta device is enough.

    Args:
        model: a `PreTrainedModel` without any wrapper.
        dtype: safetensors name to enter for every tensor; None leaves it open.
    """
    return LiveModel(
        tensors={
            name: Expected(name, tuple(tensor.shape), dtype)
            for name, tensor in model.named_parameters(remove_duplicate=False)
        },
        modules={name: _kind(module) for name, module in model.named_modules() if name},
        tied={str(k): str(v) for k, v in model.all_tied_weights_keys.items()},
        transposed=frozenset(
            name for name, one in model.named_modules() if getattr(one, "is_transposed", False)
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
