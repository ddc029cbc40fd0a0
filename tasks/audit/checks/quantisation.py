"""Check how weights are stored: quantization_config against the tensors, and dtypes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from tasks.audit.catalogue.model import Dtypes, Quantisation
from tasks.audit.config_fields import of_text, text_config
from tasks.audit.finding import Finding
from tasks.audit.recognise import CONFIG
from tasks.audit.source import Source
from tasks.audit.weights import StoredTensor
from tasks.weights.files.reader import DTYPE_NAMES
from tasks.weights.quantized.config_fields import QUANTIZATION, stored

_STATES: Mapping[str, tuple[str, ...]] = {
    # By method: suffixes that are added to the key of a weight, or replace it.
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
"""Written by NVIDIA's exporter; config.json then says nothing about quantisation."""
_PACKED_DTYPES = ("U8", "I8", "I32", "F8_E4M3", "F8_E5M2")
_BYTES = ("U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_FLOATS = ("F64", "F32", "BF16", "F16")


def check(source: Source) -> Iterator[Finding]:
    """Compare quantization_config with the tensors, then find states without packed weights."""
    if not source.is_model or not source.weights.is_whole or not source.tensors:
        return
    states = {key: method_name for key in source.tensors if (method_name := _method_of(key))}
    how = stored(source.config())
    method = how.partition(",")[0] if how else ""
    packed = {key: _is_packed(key, source.tensors) for key in states}
    residue = [key for key, fine in packed.items() if not fine]
    yield from Quantisation.QUANT_RESIDUE.of(
        source, residue, found=f"{len(residue)} quantisation states",
        expected="packed weights, or no states",
    )  # fmt: skip
    real = [key for key, fine in packed.items() if fine]
    stores_packed = any(tensor.dtype in _PACKED_DTYPES for tensor in source.tensors.values())
    if method in _STATES and not states and not stores_packed:
        yield Quantisation.QUANT_CONFIG_STALE.at(
            CONFIG, found=f"{QUANTIZATION} of {how}, and no packed tensor",
            expected=f"no {QUANTIZATION}",
        )  # fmt: skip
    if not method and real and not is_declared_elsewhere(source):
        yield Quantisation.QUANT_CONFIG_ABSENT.at(
            CONFIG, real, found=f"states of {states[real[0]]}", expected=f"{QUANTIZATION}"
        )
    if method == _BITSANDBYTES:
        yield from _partial(source, real)
    if (not method or method in ("fp8", "fbgemm_fp8")) and not states:
        bare = [
            key for key, tensor in source.tensors.items()
            if len(tensor.shape) in (2, 3) and tensor.dtype in _BYTES and tensor.numel
        ]  # fmt: skip
        if not is_declared_elsewhere(source):
            yield from Quantisation.QUANT_NO_SCALES.of(
                source, bare, found=f"{len(bare)} matrices of {source.tensors[bare[0]].dtype}"
                if bare else "", expected="16-bit or 32-bit weights, or scales",
            )  # fmt: skip


def is_declared_elsewhere(source: Source) -> bool:
    """Return True if another file or key that vLLM reads says that the weights are packed."""
    config = source.config()
    inner = text_config(config)
    beside = (inner.get(QUANTIZATION), config.get("compression_config"))
    is_set = any(isinstance(settings, Mapping) and settings for settings in beside)
    return _MODELOPT in source.folder.files or (is_set and not config.get(QUANTIZATION))


def _method_of(key: str) -> str:
    """Return the quantisation method that writes such a key, or ""."""
    for method, marks in _STATES.items():
        for mark in marks:
            if key.endswith(mark) or (mark.endswith(".") and mark in key):
                return method
    return ""


def _weight_of(key: str) -> str:
    """Return the key of the weight that a state belongs to; the key itself if it names none."""
    for mark in (".quant_state.", ".nested_absmax", ".nested_quant_map", ".absmax", ".quant_map"):
        if mark in key:
            return key.partition(mark)[0]
    if key.endswith(".SCB"):
        return key.removesuffix("SCB") + "weight"
    return key.removesuffix("_inv").removesuffix("_scale")


def _is_packed(key: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Return True if the weight of a state is packed; assume so if the key names no weight."""
    weight = _weight_of(key)
    tensor = tensors.get(weight)
    if weight == key or (tensor is None and "_scale" in key):
        return True  # such methods use other names for packed weights
    # bitsandbytes may pack into a float dtype: then the shape decides.
    return tensor is not None and (tensor.dtype in _PACKED_DTYPES or tensor.shape[1:] == (1,))


def _partial(source: Source, states: list[str]) -> Iterator[Finding]:
    """Report packed matrices whose quantisation state is missing."""
    known = {_weight_of(key) for key in states}
    lost = [
        key
        for key, tensor in source.tensors.items()
        if key.endswith(".weight") and tensor.dtype == "U8" and key not in known
    ]
    yield from Quantisation.QUANT_PARTIAL.of(
        source, lost, found=f"{len(lost)} packed weights without a state",
        expected="absmax, quant_map and quant_state of each",
    )  # fmt: skip
    if states and not lost:
        yield Quantisation.QUANT_MERGED.at(
            CONFIG, found=stored(source.config()) or "", expected="nothing, if it is intended"
        )


def check_dtypes(source: Source) -> Iterator[Finding]:
    """Compare dtypes of matrices; many families keep norms, biases and gates in fp32 on purpose."""
    if not (source.is_model or source.is_adapter) or not source.tensors:
        return
    if source.is_model and stored(source.config()) is not None:
        return  # scales and states have their own dtypes
    # peft keeps LoRA pairs in fp32; modules that it stores in full have the base's dtype.
    compared = {
        key: tensor
        for key, tensor in source.tensors.items()
        if (".lora_" in key if source.is_adapter else key.endswith(".weight")) and not _is_head(key)
    }
    sizes = _matrix_bytes(compared)
    if not sizes:
        return
    usual = sizes.most_common(1)[0][0]
    others = [
        key for key, tensor in compared.items() if _is_matrix(tensor) and tensor.dtype != usual
    ]
    shares = ", ".join(f"{name} {nbytes / sizes.total():.0%}" for name, nbytes in sizes.items())
    yield from Dtypes.DTYPE_MIXED.of(source, others, found=f"{shares} of the bytes", expected=usual)
    if not source.is_model:
        return
    config = source.config()
    dtype = of_text(config, "dtype") or of_text(config, "torch_dtype")
    wanted = DTYPE_NAMES.get(dtype) if isinstance(dtype, str) else None
    if wanted is not None and wanted != usual:
        yield Dtypes.DTYPE_NOT_CONFIG.at(
            CONFIG, found=f"{usual} weights, dtype {dtype}", expected="the same"
        )
    base = source.base
    if base is not None and base.is_model and stored(base.config()) is None:
        base_sizes = _matrix_bytes(base.tensors).most_common(1)
        if base_sizes and base_sizes[0][0] != usual:
            yield Dtypes.DTYPE_NOT_OF_BASE.at(
                "", found=usual, expected=f"{base_sizes[0][0]}, as the base has"
            )


def _matrix_bytes(tensors: Mapping[str, StoredTensor]) -> Counter[str]:
    """Return the number of bytes of matrices by dtype."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        if _is_matrix(tensor):
            sizes[tensor.dtype] += tensor.nbytes
    return sizes


def _is_matrix(tensor: StoredTensor) -> bool:
    return len(tensor.shape) >= 2 and tensor.dtype in _FLOATS and tensor.nbytes > 0


def _is_head(key: str) -> bool:
    """Return True for reward heads and expert routers, which are kept in a wider dtype."""
    return any(part in f".{key}" for part in (".score.", ".v_head.", ".gate.weight", ".router."))
