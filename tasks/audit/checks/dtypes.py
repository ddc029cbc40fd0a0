"""dtypes of the weights: one, the one of config.json, the one of the base."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from tasks.audit.catalogue import dtypes as say
from tasks.audit.config_fields import of_text
from tasks.audit.finding import Finding
from tasks.audit.recognise import CONFIG
from tasks.audit.source import Source
from tasks.audit.weights import Held
from tasks.weights.files.reader import DTYPE_NAMES
from tasks.weights.quantized.config_fields import stored

_FLOATS = ("F64", "F32", "BF16", "F16")


def check(source: Source) -> Iterator[Finding]:
    """Of matrices: norms, biases and gates are kept in fp32 on purpose by many families."""
    if not (source.is_model or source.is_adapter) or not source.tensors:
        return
    if source.is_model and stored(source.config()) is not None:
        return  # scales and states have dtypes of their own
    # peft keeps pairs in fp32 beside modules that it stores whole, which have the base's dtype.
    compared = {
        key: held
        for key, held in source.tensors.items()
        if (".lora_" in key if source.is_adapter else key.endswith(".weight")) and not _is_head(key)
    }
    sizes = matrices(compared)
    if not sizes:
        return
    usual = sizes.most_common(1)[0][0]
    others = [key for key, held in compared.items() if _is_matrix(held) and held.dtype != usual]
    if others:
        told = ", ".join(f"{one} {nbytes / sizes.total():.0%}" for one, nbytes in sizes.items())
        yield say.DTYPE_MIXED.at(
            source.tensors[others[0]].file, others, found=f"{told} of the bytes", expected=usual
        )
    if not source.is_model:
        return
    config = source.config()
    said = of_text(config, "dtype") or of_text(config, "torch_dtype")
    wanted = DTYPE_NAMES.get(said) if isinstance(said, str) else None
    if wanted is not None and wanted != usual:
        yield say.DTYPE_NOT_CONFIG.at(
            CONFIG, found=f"{usual} weights, dtype {said}", expected="the same"
        )
    base = source.base
    if base is not None and base.is_model and stored(base.config()) is None:
        theirs = matrices(base.tensors).most_common(1)
        if theirs and theirs[0][0] != usual:
            yield say.DTYPE_NOT_OF_BASE.at("", found=usual, expected=f"{theirs[0][0]}, as the base")


def matrices(tensors: Mapping[str, Held]) -> Counter[str]:
    """Bytes of matrices by dtype."""
    found: Counter[str] = Counter()
    for held in tensors.values():
        if _is_matrix(held):
            found[held.dtype] += held.nbytes
    return found


def _is_matrix(held: Held) -> bool:
    return len(held.shape) >= 2 and held.dtype in _FLOATS and held.nbytes > 0


def _is_head(key: str) -> bool:
    """Heads of rewards and routers of experts are kept wider."""
    return any(one in f".{key}" for one in (".score.", ".v_head.", ".gate.weight", ".router."))
