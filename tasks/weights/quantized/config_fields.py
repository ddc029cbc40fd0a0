"""Read from config.json how a model's weights are stored: in 4 bits, in another way, or plainly.

stored(config)          None, or a description for users
is_packed(config)       True for bitsandbytes' 4 bits, which can be decoded
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError

QUANTIZATION = "quantization_config"
_BITSANDBYTES = "bitsandbytes"


def is_packed(config: Mapping[str, Any]) -> bool:
    """Return True if config.json declares bitsandbytes' 4-bit weights."""
    fields = _fields(config)
    return _method(fields) == _BITSANDBYTES and _loads(fields, 4) and not _loads(fields, 8)


def stored(config: Mapping[str, Any]) -> str | None:
    """Return how weights are stored, for users: "gptq", "bitsandbytes, 8 bits"; None for plain."""
    fields = _fields(config)
    method = _method(fields)
    if not fields or method != _BITSANDBYTES:
        return method if fields else None
    if is_packed(config):
        kind = fields.get("bnb_4bit_quant_type")
        return f"bitsandbytes, 4 bits, {kind}" if kind else "bitsandbytes, 4 bits"
    return "bitsandbytes, 8 bits" if _loads(fields, 8) else "bitsandbytes, number of bits unknown"


def require_decodable(config: Mapping[str, Any], folder: Path) -> None:
    """Raise ArtifactError if the weights are quantized in a way that cannot be decoded."""
    how = stored(config)
    if how is None or is_packed(config):
        return
    raise ArtifactError(
        f"{folder}: its weights are stored quantised ({how}); "
        "only bitsandbytes' 4 bits (nf4, fp4) can be decoded",
        hint="give the same model in bf16, fp16 or fp32; for an adapter that was trained on this "
        "one, expect drift",
    )


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of the same model once it is decoded."""
    return {key: value for key, value in config.items() if key != QUANTIZATION}


def _fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    fields = config.get(QUANTIZATION)
    if fields is None or fields == {}:
        return {}
    return fields if isinstance(fields, Mapping) else {"quant_method": f"unreadable: {fields!r}"}


def _method(fields: Mapping[str, Any]) -> str:
    """Return `quant_method`; early bitsandbytes checkpoints only have `load_in_4bit`."""
    early = _loads(fields, 4) or _loads(fields, 8)
    return str(fields.get("quant_method") or (_BITSANDBYTES if early else "an unknown method"))


def _loads(fields: Mapping[str, Any], bits: int) -> bool:
    return bool(fields.get(f"load_in_{bits}bit") or fields.get(f"_load_in_{bits}bit"))
