"""Open a full model; a base in 4 bits or fp8 as if it were plain: decoded shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.contract import TensorLike
from tasks.core.errors import ArtifactError, first_and_more
from tasks.weights.files.documents import read_json
from tasks.weights.files.dtypes import DTYPE_NAMES, widened
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.files.tensors import Extent, Reader, Sources, Tensor, Tensors
from tasks.weights.pickled.tensors import is_pickled_model, read_model
from tasks.weights.plan import Plan
from tasks.weights.quantized.bnb4 import STATE, decode, read_states
from tasks.weights.quantized.config_fields import (
    is_fp8,
    is_packed,
    remedy,
    require_decodable,
    stored,
)
from tasks.weights.quantized.fp8 import (
    DTYPE,
    FP8,
    is_activation_scale,
    read_scales,
    scaled_values,
)

if TYPE_CHECKING:
    import torch

_SHOWN = 50
_CONV1D = {
    "gpt2": ("c_attn", "q_attn", "c_proj", "c_fc"),
    "openai-gpt": ("c_attn", "c_proj", "c_fc"),
    "imagegpt": ("c_attn", "q_attn", "c_proj", "c_fc"),
    "decision_transformer": ("c_attn", "q_attn", "c_proj", "c_fc"),
}
"""Linear layers stored as (in, out), by model type; transformers packs their transpose."""


def read_base(root: Path) -> Tensors:
    """Read the headers of a full model's folder, stored plainly, in bitsandbytes' 4 bits or in fp8.

    Packed matrices look decoded, and keys of their parts are left out. The ranges of such a matrix
    are those of its parts, one after the other, and a plan has to decode them (`decoding`).
    Raises ArtifactError with all findings: another quantization, matrices without their parts.
    """
    path = root / "config.json"
    config = read_json(path) if path.is_file() else {}
    require_decodable(config, root)
    whole = read_checkpoint(root)
    if is_fp8(config) or any(info.dtype == DTYPE for info in whole.values()):
        kind, hint = "fp8", remedy(root)
        findings = fp8_findings(whole, config)
        packed, _ = read_scales(whole, config)
    elif is_packed(config) or any(STATE in key for key in whole):
        kind, hint = "4-bit", "save it again with save_pretrained, or give the same model in bf16"
        packed, findings = read_states(whole)
        if not is_packed(config):
            findings.insert(0, "config.json does not say that the weights are packed in 4 bits")
        elif not packed and not findings:
            findings.append(
                f"config.json says {stored(config)}, but no tensor is packed: "
                "if these are plain weights, remove quantization_config from it"
            )
    else:
        return whole
    if findings:
        raise ArtifactError(
            f"{root}: not a usable {kind} checkpoint: {first_and_more(findings)}",
            details=findings[:_SHOWN],
            hint=hint,
        )
    sides = {side for matrix in packed.values() for side in matrix.sides}
    sides |= set(filter(is_activation_scale, whole)) if kind == "fp8" else set()
    tensors = {key: info for key, info in whole.items() if key not in sides}
    for key, (packing, sides_of) in packed.items():
        turned = kind == "4-bit" and _is_conv1d(key, config)
        # Tables of values and JSON come last: they are not decoded, but belong to the matrix.
        parts = [key + suffix for suffix, _ in packing["parts"]]
        parts += [side for side in sides_of if side not in parts]
        shape = tuple(packing["shape"])
        tensors[key] = Tensor(
            shape[::-1] if turned else shape,
            DTYPE_NAMES[packing["dtype"]],
            tuple(extent for part in parts for extent in whole[part].extents),
            packed={**packing, "turned": turned},
        )
    return tensors


def open_model(root: Path) -> Tensors:
    """Open a full model, headers only: safetensors (plain or quantized) or `.bin` files."""
    return read_model(root) if is_pickled_model(root) else read_base(root)


def fp8_findings(tensors: Mapping[str, TensorLike], config: Mapping[str, Any]) -> list[str]:
    """Return why a base in fp8 cannot be decoded, from its headers; also what `audit` reports."""
    if not is_fp8(config):
        return [f"config.json does not say how weights are stored in {DTYPE}"]
    packed, findings = read_scales(tensors, config)
    if not packed and not findings:
        findings.append(f"config.json says {stored(config)}, but no tensor is stored in {DTYPE}")
    return findings


def _is_conv1d(key: str, config: Mapping[str, Any]) -> bool:
    names = _CONV1D.get(str(config.get("model_type")), ())
    return key.removesuffix(".weight").rpartition(".")[2] in names


def decoding(plan: Plan, sources: Sources) -> Plan:
    """Return the same plan, in which operations on packed matrices decode them.

    The stored 4 bits are those that training used, so nothing else is quantized, and there is no
    original to compare with.
    """
    ops = []
    for op in plan.ops:
        packed = packing(sources[op.input], op.key) if op.input in sources else None
        ops.append(op if packed is None else replace(op, packed=packed, quantization=None))
    return replace(plan, ops=tuple(ops))


def packing(source: Tensors, key: str) -> Mapping[str, Any] | None:
    """Return `Op.packed` for operations on this tensor; None for a plain tensor."""
    packed: Mapping[str, Any] | None = getattr(source.get(key), "packed", None)
    return packed


def decoded(packing: Mapping[str, Any], extents: Sequence[Extent]) -> torch.Tensor:
    """Decode a matrix in its own dtype, from the ranges of its parts, one after the other."""
    import torch

    if packing["type"] == FP8:
        return torch.from_numpy(decoded_values(packing, extents))
    raw = torch.from_numpy(decode(packing, _parts(packing, extents)))
    matrix = raw.view(getattr(torch, packing["dtype"])).reshape(packing["shape"])
    return matrix.t().contiguous() if packing["turned"] else matrix


def decoded_values(packing: Mapping[str, Any], extents: Sequence[Extent]) -> NDArray[np.float32]:
    """Decode the same matrix to fp32 values that are rounded to its dtype, without torch."""
    parts = _parts(packing, extents)
    if packing["type"] == FP8:
        return scaled_values(packing, parts)
    values = widened(decode(packing, parts), DTYPE_NAMES[packing["dtype"]])
    matrix = values.reshape(packing["shape"])
    return np.ascontiguousarray(matrix.T) if packing["turned"] else matrix


def _parts(packing: Mapping[str, Any], extents: Sequence[Extent]) -> dict[str, NDArray[np.uint8]]:
    """Read every part into its own memory, so that it is aligned; by suffix."""
    parts: dict[str, NDArray[np.uint8]] = {}
    at = 0
    with Reader(extents) as reader:
        for suffix, size in packing["parts"]:
            parts[suffix] = reader.read(at, size)
            at += size
    return parts
