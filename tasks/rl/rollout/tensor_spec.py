"""What is known of a tensor that is handed over, as contracts look at it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Held:
    """Shape and dtype (safetensors name) of a tensor."""

    shape: tuple[int, ...]
    dtype: str
