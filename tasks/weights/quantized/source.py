"""Open a full model; a base in 4 bits or fp8 as if it were plain: decoded shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError, first_and_more
from tasks.weights.files.documents import read_json
from tasks.weights.files.dtypes import DTYPE_NAMES
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.files.tensors import Tensor, Tensors
from tasks.weights.pickled.torch_file import is_pickled_model, read_model
from tasks.weights.quantized.config_fields import (
    is_fp8,
    is_packed,
    remedy,
    require_decodable,
    stored,
)
from tasks.weights.quantized.packed import (
    DTYPE,
    STATE,
    Packed,
    is_activation_scale,
    read_scales,
    read_states,
)

_SHOWN = 50
_CONV1D = {
    "gpt2": ("c_attn", "q_attn", "c_proj", "c_fc"),
    "openai-gpt": ("c_attn", "c_proj", "c_fc"),
    "imagegpt": ("c_attn", "q_attn", "c_proj", "c_fc"),
    "decision_transformer": ("c_attn", "q_attn", "c_proj", "c_fc"),
}
"""Linear layers stored as (in, out), by model type; transformers packs their transpose."""


def open_model(root: Path) -> Tensors:
    """Open a full model, headers only: safetensors (plain or quantized) or `.bin` files."""
    return read_model(root) if is_pickled_model(root) else read_base(root)


def read_base(root: Path) -> Tensors:
    """Read the headers of a full model's folder, stored plainly, in bitsandbytes' 4 bits or in fp8.

    Packed matrices look decoded, and keys of their parts are left out. The ranges of such a matrix
    are those of its parts, one after the other, and a plan decodes them (`Op.packed`).

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
    plain = {key: tensor for key, tensor in whole.items() if key not in sides}
    layers = _CONV1D.get(str(config.get("model_type")), ()) if kind == "4-bit" else ()
    turned = tuple(f".{layer}{end}" for layer in layers for end in ("", ".weight"))
    return plain | {
        key: _decoded(whole, key, matrix, turned=f".{key}".endswith(turned))
        for key, matrix in packed.items()
    }


def _decoded(whole: Tensors, key: str, matrix: Packed, *, turned: bool) -> Tensor:
    """Return a packed matrix as it looks decoded."""
    # Tables of values and JSON come last: they are not decoded, but belong to the matrix.
    parts = [key + suffix for suffix, _ in matrix.packing["parts"]]
    parts += [side for side in matrix.sides if side not in parts]
    shape = tuple(matrix.packing["shape"])
    return Tensor(
        shape[::-1] if turned else shape,
        DTYPE_NAMES[matrix.packing["dtype"]],
        tuple(extent for part in parts for extent in whole[part].extents),
        packed={**matrix.packing, "turned": turned},
    )


def fp8_findings(tensors: Tensors, config: Mapping[str, Any]) -> list[str]:
    """Return why a base in fp8 cannot be decoded, from its headers; also what `audit` reports."""
    if not is_fp8(config):
        return [f"config.json does not say how weights are stored in {DTYPE}"]
    packed, findings = read_scales(tensors, config)
    if not packed and not findings:
        findings.append(f"config.json says {stored(config)}, but no tensor is stored in {DTYPE}")
    return findings
