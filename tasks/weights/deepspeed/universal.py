"""Universal checkpoints: `zero/<parameter>/fp32.pt`, as `ds_to_universal.py` writes them.

From ZeRO-1 and 2 a file holds `{"param": tensor}` in its shape; from ZeRO-3 the bare flat tensor,
whose shape stands in the model states that were copied beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

from tasks.core.errors import ArtifactError
from tasks.weights.deepspeed.pieces import Whole
from tasks.weights.deepspeed.states import Shapes
from tasks.weights.files.dtype_bits import is_float
from tasks.weights.pickled.tensors import TensorRef, read_torch_file

_FILE = "fp32.pt"


def universal(
    zero: Path, groups: Sequence[Shapes], known: frozenset[str], findings: list[str]
) -> dict[str, Whole]:
    """The trained parameters of a universal checkpoint, in the order of training's groups.

    Args:
        zero: the folder of the parameters.
        groups: shapes by name.
        known: other names that may have a folder: what the module holds beside them.
        findings: what is absent, extra or of another size is appended here.
    """
    shapes = {name: shape for group in groups for name, shape in group.items()}
    there = {path.parent.name for path in zero.glob(f"*/{_FILE}")}
    findings += [f"zero/{name}: not a parameter of the model" for name in sorted(
        there - set(shapes) - known
    )]  # fmt: skip
    found = {}
    for name, shape in shapes.items():
        if name not in there or Path(name).name != name:
            findings.append(f"{name}: no zero/{name}/{_FILE}")
            continue
        try:
            found[name] = _parameter(zero / name / _FILE, shape)
        except ArtifactError as error:
            findings.append(error.message)
    return found


def _parameter(path: Path, shape: tuple[int, ...]) -> Whole:
    file = read_torch_file(path)
    ref = file.content.get("param") if isinstance(file.content, dict) else file.content
    if not isinstance(ref, TensorRef):
        raise ArtifactError(f"{path}: holds no tensor")
    if ref.shape != shape and ref.shape != (prod(shape),):
        raise ArtifactError(f"{path}: {list(ref.shape)}, the model's is {list(shape)}")
    if not is_float(ref.dtype):
        raise ArtifactError(f"{path}: {ref.dtype}, which is no float")
    return Whole(shape, ref.dtype, (file.extent(ref),))
