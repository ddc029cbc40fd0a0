"""The same weights twice, as safetensors and as `.bin`: is the set that loaders leave aside whole.

OpenRLHF under ZeRO-3 writes the gathered tensors as `.bin`; killed at the wrong moment it leaves
PEFT's empty safetensors beside them, which every loader prefers.
"""

from __future__ import annotations

from tasks.audit.recognise import ADAPTERS, MODELS
from tasks.audit.source import Source
from tasks.audit.weights import Weights, open_weights


def other_set(source: Source) -> Weights | None:
    """The set that is not taken; None where there is one set."""
    names = ADAPTERS if source.is_adapter else MODELS
    if source.weights.single not in names:
        return None
    other = next(one for one in names if one != source.weights.single)
    found = open_weights(source.folder, other)
    return found if found.files else None


def is_broken(weights: Weights) -> bool:
    """Whether a file or a tensor of it is not there, or is empty."""
    empty = any(not one.numel for one in weights.tensors.values())
    return empty or not weights.tensors or not weights.is_whole


def whole_beside(source: Source) -> str:
    """Name of the set beside broken weights that can take their place; "" where none can."""
    if not is_broken(source.weights):
        return ""
    other = other_set(source)
    return other.single if other is not None and not is_broken(other) else ""
