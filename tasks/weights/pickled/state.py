"""Open pickled state dicts as a `Source`: one file (`adapter_model.bin`), or a model of several.

source = read_model(folder)       pytorch_model.bin, or its index and the files it names
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError, first_and_more
from tasks.weights.files.index import index_of, survey, weight_files
from tasks.weights.files.names import without_wrappers
from tasks.weights.files.source import Extent
from tasks.weights.pickled.tensors import TensorRef, TorchFile, read_torch_file

MODEL = "pytorch_model.bin"
"""File name of a pickled model in transformers; the index of several files is named after it."""
_SHOWN = 50
_AGAIN = "save it as safetensors, with every tensor gathered and contiguous"


@dataclass(frozen=True)
class PickledState:
    """Tensors of one or several `.bin` files; implements `tasks.weights.files.source.Source`."""

    tensors: Mapping[str, TensorRef]
    _holders: Mapping[str, TorchFile]

    def extents(self, name: str) -> Sequence[Extent]:
        """Return the tensor's byte range; it is always one."""
        return (self._holders[name].extent(self.tensors[name]),)

    def checksum(self, name: str) -> str | None:
        """Return None: pickles store no hashes."""
        return None


def read_state(path: Path) -> PickledState:
    """Open a pickled state dict; runs none of its code and loads no tensor.

    Raises:
        ArtifactError: not written by torch.save, not a flat dictionary of tensors, or tensors
            without elements (ZeRO-3 leaves them if a model is saved without being gathered).
    """
    file = read_torch_file(path)
    if not isinstance(file.content, dict):
        raise ArtifactError(
            f"{path}: holds a {type(file.content).__name__}, not a state dict",
            hint="give the file that torch.save(model.state_dict(), path) wrote",
        )
    if key := nested_in(file.content):
        raise ArtifactError(
            f"{path}: a trainer's checkpoint, its state dict lies under the key {key!r}",
            hint=unnesting(path, key),
        )
    findings: list[str] = []
    tensors: dict[str, TensorRef] = {}
    for name, value in file.content.items():
        if not isinstance(name, str) or not isinstance(value, TensorRef):
            findings.append(f"{name!r}: not a tensor")
        elif value.numel == 0:
            findings.append(f"{name}: has no elements, shape {list(value.shape)}")
        elif not value.contiguous:
            findings.append(f"{name}: strides {list(value.stride)} of shape {list(value.shape)}")
        else:
            tensors[name] = value
    if not file.content:
        findings.append("it is empty")
    if findings:
        raise ArtifactError(
            f"{path}: not a usable state dict: {first_and_more(findings)}",
            details=findings[:_SHOWN],
            hint=_AGAIN,
        )
    return PickledState(tensors, dict.fromkeys(tensors, file))


def nested_in(content: Mapping[Any, Any]) -> str:
    """Return the key under which a trainer's checkpoint keeps its state dict; "" for a flat one."""
    if any(isinstance(value, TensorRef) for value in content.values()):
        return ""
    for key, value in content.items():
        if isinstance(value, dict) and any(isinstance(v, TensorRef) for v in value.values()):
            return str(key)
    return ""


def unnesting(path: Path, key: str) -> str:
    """Return the command that leaves the state dict alone in the file."""
    load = f"torch.load('{path}', weights_only=True, map_location='cpu')"
    return f"python -c \"import torch; torch.save({load}[{key!r}], '{path}')\""


def is_pickled_model(root: Path) -> bool:
    """Return True if a folder holds a model in `.bin` files and none in safetensors."""
    pickled = any((root / name).is_file() for name in (MODEL, index_of(MODEL)))
    return pickled and not weight_files(root, "model*.safetensors", "model*.safetensors.index.json")


def read_model(root: Path, *, beside: Collection[str] = ()) -> PickledState:
    """Open a model in `pytorch_model.bin`, or in the files that its index names.

    Args:
        root: the folder.
        beside: names of other weight files in the folder that the caller reads itself.

    Raises:
        ArtifactError: files are absent or outside of the folder, tensors are not where the index
            says, or there are stray weight files. Lists every finding of every file.
    """
    model = survey(root, MODEL, read_state, beside=beside)
    if model.findings:
        raise ArtifactError(
            f"{root}: not a usable checkpoint: {first_and_more(model.findings)}",
            details=model.findings[:_SHOWN],
            hint=f"expected {MODEL}, or {index_of(MODEL)} and its files; or {_AGAIN}",
        )
    states = {key: model.opened[file] for key, file in model.files.items()}
    return PickledState(
        {key: states[name].tensors[name] for key, name in without_wrappers(states).items()},
        {key: states[name]._holders[name] for key, name in without_wrappers(states).items()},
    )
