"""Reading back what ranks wrote of the trained tensors, whatever their number was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open


class _Piece(NamedTuple):
    start: int
    end: int
    path: Path


class SavedShares:
    """The share files of a folder, opened when they are needed.

    Args:
        folder: holds `rank-*.safetensors`, see `partitions.write_shares`.
    """

    def __init__(self, folder: Path) -> None:
        self._pieces: dict[str, list[_Piece]] = {}
        for path in sorted(folder.glob("rank-*.safetensors")):
            with safe_open(path, "pt") as file:
                where = json.loads(file.metadata()["partitions"])
            for name, at in where.items():
                self._pieces.setdefault(name, []).append(_Piece(at["start"], at["end"], path))

    def whole(self, name: str) -> torch.Tensor:
        """All elements of a tensor, flat."""
        return self.part(name, 0, max(piece.end for piece in self._pieces[name]))

    def part(self, name: str, start: int, end: int) -> torch.Tensor:
        """Elements [start, end) of a flattened tensor; fewer where fewer were saved."""
        found = []
        for piece in sorted(self._pieces[name]):
            low, high = max(start, piece.start), min(end, piece.end)
            if low < high:
                with safe_open(piece.path, "pt") as file:
                    stored = file.get_slice(name)
                    found.append(stored[low - piece.start : high - piece.start])
        return torch.cat(found)
