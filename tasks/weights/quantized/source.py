"""Open a full model; a base in 4 bits or fp8 as if it were plain: decoded shapes and dtypes."""

from __future__ import annotations

from pathlib import Path

from tasks.core.errors import ArtifactError, first_and_more
from tasks.weights.files.documents import read_json
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.files.tensors import Tensors
from tasks.weights.pickled.torch_file import is_pickled_model, read_model
from tasks.weights.quantized.config_fields import is_fp8, is_packed, refusal, remedy
from tasks.weights.quantized.packed import DTYPE, STATE, read_scales, read_states

_SHOWN = 50


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
    if refused := refusal(config):
        raise ArtifactError(f"{root}: {refused}", hint=remedy(root))
    whole = read_checkpoint(root)
    if is_fp8(config) or any(info.dtype == DTYPE for info in whole.values()):
        kind, hint = "fp8", remedy(root)
        decoded = read_scales(whole, config)
    elif is_packed(config) or any(STATE in key for key in whole):
        kind, hint = "4-bit", "save it again with save_pretrained, or give the same model in bf16"
        decoded = read_states(whole, config)
    else:
        return whole
    if decoded.findings:
        raise ArtifactError(
            f"{root}: not a usable {kind} checkpoint: {first_and_more(decoded.findings)}",
            details=decoded.findings[:_SHOWN],
            hint=hint,
        )
    plain = {key: tensor for key, tensor in whole.items() if key not in decoded.sides}
    return plain | decoded.tensors
