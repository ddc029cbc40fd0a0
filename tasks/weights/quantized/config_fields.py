"""What config.json says of how a model is stored: packed in 4 bits, in some other way, or plainly.

stored(config)          None, or how it is stored, for a person
is_packed(config)       whether that is bitsandbytes' 4 bits, which can be decoded
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError

QUANTIZATION = "quantization_config"
_BITSANDBYTES = "bitsandbytes"


def is_packed(config: Mapping[str, Any]) -> bool:
    """Whether the weights are said to be bitsandbytes' 4 bits."""
    said = _said(config)
    return _method(said) == _BITSANDBYTES and _loads(said, 4) and not _loads(said, 8)


def stored(config: Mapping[str, Any]) -> str | None:
    """How the weights are stored, for a person: "gptq", "bitsandbytes, 8 bits"; None: plainly."""
    said = _said(config)
    method = _method(said)
    if not said or method != _BITSANDBYTES:
        return method if said else None
    if is_packed(config):
        kind = said.get("bnb_4bit_quant_type")
        return f"bitsandbytes, 4 bits, {kind}" if kind else "bitsandbytes, 4 bits"
    return "bitsandbytes, 8 bits" if _loads(said, 8) else "bitsandbytes, bits not said"


def require_decodable(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse what is stored in a way that is not decoded here, by name. Raises ArtifactError."""
    how = stored(config)
    if how is None or is_packed(config):
        return
    raise ArtifactError(
        f"{folder}: its weights are stored quantised ({how}); "
        "of such only bitsandbytes' 4 bits (nf4, fp4) can be decoded here",
        hint="give the same model in bf16, fp16 or fp32; for an adapter that was trained on this "
        "one, expect drift",
    )


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the same model, decoded."""
    return {key: value for key, value in config.items() if key != QUANTIZATION}


def _said(config: Mapping[str, Any]) -> Mapping[str, Any]:
    said = config.get(QUANTIZATION)
    if said is None or said == {}:
        return {}
    return said if isinstance(said, Mapping) else {"quant_method": f"unreadable: {said!r}"}


def _method(said: Mapping[str, Any]) -> str:
    """`quant_method`; early bitsandbytes checkpoints say only how many bits are loaded."""
    old = _loads(said, 4) or _loads(said, 8)
    return str(said.get("quant_method") or (_BITSANDBYTES if old else "an unknown method"))


def _loads(said: Mapping[str, Any], bits: int) -> bool:
    return bool(said.get(f"load_in_{bits}bit") or said.get(f"_load_in_{bits}bit"))
