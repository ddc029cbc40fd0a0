"""`merge.base`: which base an adapter is folded into, when training held it in 4 bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.deliver.recognise import Given
from tasks.deliver.recorded import training_record
from tasks.errors import ConfigError
from tasks.weights.reader import read_json
from tasks.weights.stored4bit.said import is_packed


def quantization_of(
    given: Given, base: Path | None, merge: Mapping[str, Any], store: Path
) -> dict[str, Any] | None:
    """What the base goes through, as `Op.quantization` says it; None where it is taken as it is.

    Our own shards and adapters record how training held the base. One made elsewhere does not:
    `auto` is then the original base, and `dequantized` has to be asked for.

    Raises:
        ConfigError: `dequantized`, though training is known not to have quantised; or an adapter
            of ours whose training cannot be found any more.
    """
    known, recorded = _recorded(given, store)
    mode = str(merge["base"])
    if given.manifest and given.kind == "adapter" and not known and mode == "auto":
        raise ConfigError(
            f"source={given.root}: its manifest does not say whether training quantised the base, "
            "and the training it names is not in paths.runs",
            hint="merge.base=original for LoRA, merge.base=dequantized for QLoRA",
        )
    if known and recorded is None and mode == "dequantized":
        raise ConfigError(
            "merge.base=dequantized, but training did not quantise the base",
            hint="merge.base=original, or merge.base=auto",
        )
    if mode == "auto":
        mode = "original" if recorded is None else "dequantized"
    if base is None or (mode == "original" and recorded is None):
        return None
    config = read_json(base / "config.json")
    if is_packed(config):
        return None  # the base as training saw it is the one that is stored
    loaded = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    named = {
        "type": str(merge["quant_type"]),
        "double_quant": bool(merge["double_quant"]),
        "compute_dtype": str(loaded),
    }
    return {**(recorded or named), "loaded_dtype": str(loaded), "base": mode}


def says_nothing(given: Given, merge: Mapping[str, Any]) -> bool:
    """Whether `auto` had to be taken on trust: an adapter that was made elsewhere."""
    made_elsewhere = given.kind in ("adapter", "deepspeed") and not given.manifest
    return made_elsewhere and str(merge["base"]) == "auto"


def _recorded(given: Given, store: Path) -> tuple[bool, dict[str, Any] | None]:
    """Whether anything of ours tells, and what it tells."""
    notes = given.manifest.get("notes", {})
    if "quantization" in notes:
        found = notes["quantization"]
        return True, dict(found) if found else None
    record = training_record(given, store)
    if record is None:
        return False, None
    found = record.get("quantization")
    return True, dict(found) if found else None
