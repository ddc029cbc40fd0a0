"""Read from config.json how a model's weights are stored: quantized in some way, or plainly.

stored(config)          None, or a description for users
is_packed(config)       True for bitsandbytes' 4 bits: the base as QLoRA training saw it
is_decodable(config)    True for these and for fp8 with scales, which is the base itself
refusal(config)         why weights cannot be decoded; `remedy(folder)`: the model to use instead
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

QUANTIZATION = "quantization_config"
_BITSANDBYTES = "bitsandbytes"
_MAX_CARD = 1 << 16
_FP8_FORMATS = ("naive-quantized", "float-quantized")
_CARD_BASE = re.compile(r"^base_model:[ \t]*(?:\n[ \t]*-)?[ \t]*[\"']?([\w./-]+)", re.M)


def is_packed(config: Mapping[str, Any]) -> bool:
    """Return True if config.json declares bitsandbytes' 4-bit weights."""
    fields = _fields(config)
    is_4_bit = bool(fields.get("load_in_4bit")) and not fields.get("load_in_8bit")
    return is_4_bit and fields.get("quant_method") == _BITSANDBYTES


def is_fp8(config: Mapping[str, Any]) -> bool:
    """Return True if config.json declares 8-bit floats with scales."""
    fields = _fields(config)
    method = fields.get("quant_method")
    if method == "compressed-tensors":
        known = fields.get("format") in _FP8_FORMATS and fields.get("sparsity_config") in (None, {})
        names = ("type", "num_bits", "symmetric")
        kinds = {tuple(each.get(name) for name in names) for each in group_weights(fields)}
        return known and bool(kinds) and kinds <= {("float", 8, True), ("float", 8, None)}
    return method == "fp8" or (method == "modelopt" and fields.get("quant_algo") == "FP8")


def is_decodable(config: Mapping[str, Any]) -> bool:
    """Return True if the weights are quantized in a way that can be decoded."""
    return is_packed(config) or is_fp8(config)


def fp8_blocks(config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the block sizes (rows, columns) that config.json declares for fp8."""
    fields = _fields(config)
    sizes = [fields.get("weight_block_size")]
    sizes += [each.get("block_structure") for each in group_weights(fields)]
    pairs = [tuple(size) for size in sizes if isinstance(size, list) and len(size) == 2]
    return [pair for pair in pairs if all(isinstance(n, int) and n > 0 for n in pair)]


def group_weights(fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return how compressed-tensors stores the weights of each group of layers."""
    groups = fields.get("config_groups")
    groups = groups.values() if isinstance(groups, Mapping) else ()
    weights = [each.get("weights") for each in groups if isinstance(each, Mapping)]
    return [each for each in weights if isinstance(each, Mapping)]


def stored(config: Mapping[str, Any]) -> str | None:
    """Return how weights are stored, for users: "gptq", "bitsandbytes, 8 bits"; None for plain."""
    fields = _fields(config)
    if not fields:
        return None
    method = str(fields.get("quant_method") or "an unknown method")
    if is_packed(config):
        return f"{method}, 4 bits, {fields.get('bnb_4bit_quant_type') or 'of unknown type'}"
    return f"{method}, 8 bits" if fields.get("load_in_8bit") else method


def refusal(config: Mapping[str, Any]) -> str:
    """Return why quantized weights cannot be decoded; "" if they can, or are plain."""
    how = stored(config)
    return f"its weights are stored quantised ({how})" if how and not is_decodable(config) else ""


def remedy(folder: Path) -> str:
    """Return the model to use instead of a quantized one, by its card if that names it."""
    card = folder / "README.md"
    text = card.read_bytes()[:_MAX_CARD].decode(errors="replace") if card.is_file() else ""
    named = _CARD_BASE.search(text.partition("\n---")[0]) if text.startswith("---") else None
    original = (
        f"{named[1]}, which its card names" if named else "the original in bf16, fp16 or fp32"
    )
    return f"base=<folder of {original}>"


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of the same model once it is decoded."""
    return {key: value for key, value in config.items() if key != QUANTIZATION}


def _fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    fields = config.get(QUANTIZATION) or {}
    return fields if isinstance(fields, Mapping) else {"quant_method": f"unreadable: {fields!r}"}
