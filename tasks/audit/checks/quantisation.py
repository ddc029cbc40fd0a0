"""quantization_config against the tensors: packed where it says so, and only there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tasks.audit.catalogue import quantisation as say
from tasks.audit.config_fields import text_config
from tasks.audit.finding import Finding
from tasks.audit.recognise import CONFIG
from tasks.audit.source import Source
from tasks.audit.weights import Held
from tasks.weights.quantized.config_fields import QUANTIZATION, stored

_STATES: Mapping[str, tuple[str, ...]] = {
    # By method: what stands behind the key of a weight, or in its place.
    "bitsandbytes": (".absmax", ".quant_map", ".quant_state.", ".nested_absmax", ".SCB"),
    "gptq": (".qweight", ".qzeros", ".g_idx"),
    "awq": (".qweight", ".qzeros"),
    "compressed-tensors": (".weight_packed", ".weight_scale", ".weight_global_scale"),
    "fp8": (".weight_scale_inv", ".weight_scale"),
    "fbgemm_fp8": (".weight_scale",),
    "mxfp4": ("_proj_blocks", "_proj_scales"),
}
_BITSANDBYTES = "bitsandbytes"
_MODELOPT = "hf_quant_config.json"
"""What NVIDIA's exporter writes beside a config.json that says nothing."""
_PACKED_DTYPES = ("U8", "I8", "I32", "F8_E4M3", "F8_E5M2")
_FLOATS = ("BF16", "F16", "F32")


def check(source: Source) -> Iterator[Finding]:
    """What config.json says against what there is; then states without packed weights."""
    if not source.is_model or not source.weights.is_whole or not source.tensors:
        return
    states = {key: one for key in source.tensors if (one := _method_of(key))}
    how = stored(source.config())
    method = how.partition(",")[0] if how else ""
    packed = {key: _is_packed(key, source.tensors) for key in states}
    residue = [key for key, fine in packed.items() if not fine]
    if residue:
        yield say.QUANT_RESIDUE.at(
            source.tensors[residue[0]].file, residue,
            found=f"{len(residue)} states of a quantiser", expected="packed weights, or no states",
        )  # fmt: skip
    real = [key for key, fine in packed.items() if fine]
    if method in _STATES and not states and _has_no_packed(source.tensors):
        yield say.QUANT_CONFIG_STALE.at(
            CONFIG, found=f"{QUANTIZATION} of {how}, and no packed tensor",
            expected=f"no {QUANTIZATION}",
        )  # fmt: skip
    if not method and real and not is_said_elsewhere(source):
        yield say.QUANT_CONFIG_ABSENT.at(
            CONFIG, real, found=f"states of {states[real[0]]}", expected=f"{QUANTIZATION}"
        )
    if method == _BITSANDBYTES:
        yield from _partial(source, real)


def is_said_elsewhere(source: Source) -> bool:
    """Whether it is told to be packed in a place that vLLM reads beside the usual one."""
    config = source.config()
    inner = text_config(config)
    beside = (inner.get(QUANTIZATION), config.get("compression_config"))
    said = any(isinstance(one, Mapping) and one for one in beside)
    return _MODELOPT in source.folder.files or (said and not config.get(QUANTIZATION))


def _method_of(key: str) -> str:
    """The quantiser that writes such a key."""
    for method, marks in _STATES.items():
        for mark in marks:
            if key.endswith(mark) or (mark.endswith(".") and mark in key):
                return method
    return ""


def _weight_of(key: str) -> str:
    """Key of the weight that a state is of; its own where the method has other names for it."""
    for mark in (".quant_state.", ".nested_absmax", ".nested_quant_map", ".absmax", ".quant_map"):
        if mark in key:
            return key.partition(mark)[0]
    if key.endswith(".SCB"):
        return key.removesuffix("SCB") + "weight"
    return key.removesuffix("_inv").removesuffix("_scale")


def _is_packed(key: str, tensors: Mapping[str, Held]) -> bool:
    """Whether a state is of something packed; where it names no weight it is taken to be."""
    weight = _weight_of(key)
    held = tensors.get(weight)
    if weight == key or (held is None and "_scale" in key):
        return True  # such methods pack under names of their own
    # bitsandbytes packs into the dtype that it is told, floats included: then the shape tells.
    return held is not None and (held.dtype in _PACKED_DTYPES or held.shape[1:] == (1,))


def _has_no_packed(tensors: Mapping[str, Held]) -> bool:
    return not any(held.dtype in _PACKED_DTYPES for held in tensors.values())


def _partial(source: Source, states: list[str]) -> Iterator[Finding]:
    """Packed matrices of which the state was lost."""
    known = {_weight_of(key) for key in states}
    lost = [
        key
        for key, held in source.tensors.items()
        if key.endswith(".weight") and held.dtype == "U8" and key not in known
    ]
    if lost:
        yield say.QUANT_PARTIAL.at(
            source.tensors[lost[0]].file, lost, found=f"{len(lost)} packed weights without a state",
            expected="absmax, quant_map and quant_state of each",
        )  # fmt: skip
    if states and not lost:
        yield say.QUANT_MERGED.at(
            CONFIG, found=stored(source.config()) or "", expected="as it is meant"
        )
