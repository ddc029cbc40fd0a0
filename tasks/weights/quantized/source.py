"""Open a base stored in 4 bits or fp8 as if it were plain: decoded shapes and dtypes by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.core.contract import TensorLike
from tasks.core.errors import ArtifactError, first_and_more
from tasks.weights.execute.writer import Spec
from tasks.weights.files.documents import read_json
from tasks.weights.files.reader import DTYPE_NAMES, Checkpoint, read_checkpoint
from tasks.weights.files.source import Extent, Source
from tasks.weights.plan.operations import Plan
from tasks.weights.quantized.config_fields import (
    is_fp8,
    is_packed,
    remedy,
    require_decodable,
    stored,
)
from tasks.weights.quantized.fp8 import DTYPE, Scaled, is_activation_scale, read_scales
from tasks.weights.quantized.packed import STATE, STORED, Packed
from tasks.weights.quantized.states import read_states

_SHOWN = 50
_CONV1D = {
    "gpt2": ("c_attn", "q_attn", "c_proj", "c_fc"),
    "openai-gpt": ("c_attn", "c_proj", "c_fc"),
    "imagegpt": ("c_attn", "q_attn", "c_proj", "c_fc"),
    "decision_transformer": ("c_attn", "q_attn", "c_proj", "c_fc"),
}
"""Linear layers stored as (in, out), by model type; transformers packs their transpose."""


@dataclass(frozen=True)
class PackedCheckpoint:
    """An opened checkpoint whose packed matrices look decoded.

    The bytes of such a matrix are not those of the tensor that is shown: `extents` returns the
    ranges of its parts, one after the other, and a plan has to decode them (`decoding`).

    Attributes:
        whole: the checkpoint as stored.
        packed: packing of each packed matrix, by key.
        turned: keys of matrices that are shown as the transpose of what was packed.
        tensors: shapes and dtypes (safetensors names) by key, without keys that belong to a matrix.
    """

    whole: Checkpoint
    packed: Mapping[str, Packed | Scaled]
    turned: frozenset[str]
    tensors: Mapping[str, TensorLike]

    @property
    def root(self) -> Path:
        """Folder of the checkpoint."""
        return self.whole.root

    @property
    def files(self) -> Mapping[str, str]:
        """File name by key."""
        return {key: self.whole.files[key] for key in self.tensors}

    def extents(self, name: str) -> Sequence[Extent]:
        """Return the byte ranges of a tensor; for a packed one those of all its parts.

        Its table of values and its JSON come last; they are not decoded, but belong to it.
        """
        if name not in self.packed:
            return self.whole.extents(name)
        packed = self.packed[name]
        parts = [name + suffix for suffix, _ in packed.parts]
        rest = [key for key in packed.sides if key not in parts]
        return [extent for key in (*parts, *rest) for extent in self.whole.extents(key)]

    def checksum(self, name: str) -> str | None:
        """Return the hash of a plain tensor from the manifest; None for a packed one."""
        return None if name in self.packed else self.whole.checksum(name)


Base = Checkpoint | PackedCheckpoint


def read_base(root: Path) -> Base:
    """Read the headers of a full model's folder, stored plainly, in bitsandbytes' 4 bits or in fp8.

    Raises:
        ArtifactError: the weights are quantized in another way, config.json and the tensors
            disagree, or packed matrices lack parts or have wrong ones. Lists every finding.
    """
    path = root / "config.json"
    config = read_json(path) if path.is_file() else {}
    require_decodable(config, root)
    whole = read_checkpoint(root)
    if is_fp8(config) or any(info.dtype == DTYPE for info in whole.tensors.values()):
        return _scaled(whole, config)
    declared = is_packed(config)
    if not declared and not any(STATE in key for key in whole.tensors):
        return whole
    return _packed(whole, config, declared)


def fp8_findings(tensors: Mapping[str, TensorLike], config: Mapping[str, Any]) -> list[str]:
    """Return why a base in fp8 cannot be decoded, from its headers; also what `audit` reports."""
    if not is_fp8(config):
        return [f"config.json does not say how weights are stored in {DTYPE}"]
    packed, findings = read_scales(tensors, config)
    if not packed and not findings:
        findings.append(f"config.json says {stored(config)}, but no tensor is stored in {DTYPE}")
    return findings


def _scaled(whole: Checkpoint, config: Mapping[str, Any]) -> PackedCheckpoint:
    findings = fp8_findings(whole.tensors, config)
    if findings:
        raise ArtifactError(
            f"{whole.root}: not a usable fp8 checkpoint: {first_and_more(findings)}",
            details=findings[:_SHOWN],
            hint=remedy(whole.root),
        )
    packed, _ = read_scales(whole.tensors, config)
    beside = {side for matrix in packed.values() for side in matrix.sides}
    tensors: dict[str, TensorLike] = {
        key: Spec(key, packed[key].shape, "F32") if key in packed else info
        for key, info in whole.tensors.items()
        if key not in beside and not is_activation_scale(key)
    }
    return PackedCheckpoint(whole, packed, frozenset(), tensors)


def _packed(whole: Checkpoint, config: Mapping[str, Any], declared: bool) -> PackedCheckpoint:
    packed, findings = read_states(whole)
    if not declared:
        findings.insert(0, "config.json does not say that the weights are packed in 4 bits")
    elif not packed and not findings:
        findings.append(
            f"config.json says {stored(config)}, but no tensor is packed: "
            "if these are plain weights, remove quantization_config from it"
        )
    if findings:
        raise ArtifactError(
            f"{whole.root}: not a usable 4-bit checkpoint: {first_and_more(findings)}",
            details=findings[:_SHOWN],
            hint="save it again with save_pretrained, or give the same model in bf16",
        )
    turned = frozenset(key for key in packed if _is_conv1d(key, config))
    beside = {side for matrix in packed.values() for side in matrix.sides}
    tensors: dict[str, TensorLike] = {}
    for key, info in whole.tensors.items():
        if key in packed:
            shape, dtype = packed[key].shape, DTYPE_NAMES[packed[key].dtype]
            tensors[key] = Spec(key, shape[::-1] if key in turned else shape, dtype)
        elif key not in beside:
            tensors[key] = info
    return PackedCheckpoint(whole, packed, turned, tensors)


def _is_conv1d(key: str, config: Mapping[str, Any]) -> bool:
    names = _CONV1D.get(str(config.get("model_type")), ())
    return key.removesuffix(".weight").rpartition(".")[2] in names


def decoding(plan: Plan, sources: Mapping[str, Source]) -> Plan:
    """Return the same plan, in which operations on packed matrices decode them.

    The stored 4 bits are those that training used, so nothing else is quantized, and there is no
    original to compare with.

    Args:
        plan: a plan made from the tensors that `sources` show.
        sources: inputs by name; only packed ones matter.
    """
    ops = []
    for op in plan.ops:
        quantization = packing(sources.get(op.input), op.key)
        ops.append(op if quantization is None else replace(op, quantization=quantization))
    return replace(plan, ops=tuple(ops))


def packing(source: Source | None, key: str) -> dict[str, Any] | None:
    """Return `Op.quantization` for operations on this tensor; None for a plain tensor."""
    if not isinstance(source, PackedCheckpoint) or key not in source.packed:
        return None
    stored = {**source.packed[key].as_json(), "turned": key in source.turned}
    return {STORED: stored}
