"""A pickled state dict (`adapter_model.bin`, `pytorch_model.bin`) as a `Source`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.errors import ArtifactError
from tasks.weights.pickled.tensors import TensorRef, TorchFile, read_torch_file
from tasks.weights.source import Extent


@dataclass(frozen=True)
class PickledState:
    """Tensors of one `.bin` file. See `tasks.weights.source.Source`."""

    tensors: Mapping[str, TensorRef]
    _file: TorchFile

    def extents(self, name: str) -> Sequence[Extent]:
        """The one range that the tensor is."""
        return (self._file.extent(self.tensors[name]),)

    def sha256(self, name: str) -> str | None:
        """Unknown: nothing vouches for a pickle."""
        return None


def read_state(path: Path) -> PickledState:
    """Open a pickled state dict; no code in it is run, no tensor loaded.

    Raises:
        ArtifactError: not written by torch.save, no flat dictionary of tensors, or tensors without
            elements (what ZeRO-3 leaves when a model is saved without being gathered).
    """
    file = read_torch_file(path)
    if not isinstance(file.content, dict):
        raise ArtifactError(f"{path}: holds a {type(file.content).__name__}, no state dict")
    findings: list[str] = []
    tensors: dict[str, TensorRef] = {}
    for name, value in file.content.items():
        if not isinstance(name, str) or not isinstance(value, TensorRef):
            findings.append(f"{name!r}: no tensor")
        elif value.numel == 0:
            findings.append(f"{name}: has no elements, shape {list(value.shape)}")
        elif not value.contiguous:
            findings.append(f"{name}: strides {list(value.stride)} of shape {list(value.shape)}")
        else:
            tensors[name] = value
    if findings or not tensors:
        raise ArtifactError(
            f"{path}: not a usable state dict: {findings[0] if findings else 'it is empty'}",
            details=findings[:50],
            hint="save it as safetensors, with every tensor gathered and contiguous",
        )
    return PickledState(tensors, file)
