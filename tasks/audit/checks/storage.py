"""Checks of dtypes, and of quantization_config against the tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from tasks.audit.check import ERROR, INFO, MODEL, WARNING, WHOLE, Fault, check, either
from tasks.audit.checks.names import is_declared_elsewhere
from tasks.audit.known import of_text
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
_PACKED_DTYPES = ("U8", "I8", "I32", "F8_E4M3", "F8_E5M2")
_BYTES = ("U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_FLOATS = ("F64", "F32", "BF16", "F16")


def _states(source: Source) -> dict[str, str]:
    """Return the method of each tensor that is a quantisation state, by key."""
    return {key: method for key in source.tensors if (method := _method_of(key))}


def _method(source: Source) -> str:
    """Return the method that config.json names, or ""."""
    return (stored(source.config()) or "").partition(",")[0]


@check(
    "QUANT_STATES", ERROR, needs=(MODEL, WHOLE),
    why="vLLM fails with KeyError for keys like 'weight.absmax', transformers reports unexpected "
    "keys; packed bytes without their states cannot be decoded: the values are lost",
    fix="drop the states of 16-bit weights, which a merge left behind; save a quantised model "
    "again if states are missing",
    issues="OpenRLHF #501",
)  # fmt: skip
def quantisation_states(source: Source) -> Iterator[Fault]:
    """Quantisation states of weights that are not packed, or packed weights without states."""
    states = source.once(_states)
    residue = [key for key in states if not _is_packed(key, source.tensors)]
    if residue:
        text = f"{len(residue)} quantisation states"
        yield Fault(text, "packed weights, or no states", tensors=residue)
    if lost := source.once(_undecodable):
        text = f"{len(lost)} packed weights without a state"
        yield Fault(text, "absmax, quant_map and quant_state of each", tensors=lost)


def _undecodable(source: Source) -> list[str]:
    """Return matrices that bitsandbytes packed and whose quantisation state is missing."""
    if _method(source) != _BITSANDBYTES:
        return []
    states = source.once(_states)
    known = {_weight_of(key) for key in states if _is_packed(key, source.tensors)}
    return [
        key
        for key, tensor in source.tensors.items()
        if key.endswith(".weight") and tensor.dtype == "U8" and key not in known
    ]


@check(
    "QUANT_CONFIG", ERROR, needs=(MODEL, WHOLE),
    why="transformers quantises 16-bit weights again, or loaders read packed bytes as weights: "
    "'size mismatch', KeyError for the scales, or garbage. A merge that drops scales, or keeps the "
    "base's quantization_config, leaves a model like this",
    fix="remove quantization_config if the weights are not packed; else restore it, and the "
    "scales, or merge into the base in 16 bits",
    issues="open-instruct #427, peft #2321, unsloth-zoo PR #803, unsloth #4919",
)  # fmt: skip
def quantisation_config(source: Source) -> Iterator[Fault]:
    """config.json and the tensors disagree about quantisation, or scales are missing."""
    method, states, tensors = _method(source), source.once(_states), source.tensors
    packed = any(tensor.dtype in _PACKED_DTYPES for tensor in tensors.values())
    if tensors and method in _STATES and not states and not packed:
        text = f"{QUANTIZATION} of {stored(source.config())}, and no packed tensor"
        yield Fault(text, f"no {QUANTIZATION}", file=CONFIG)
    if is_declared_elsewhere(source):
        return
    real = [key for key in states if _is_packed(key, tensors)]
    if real and not method:
        yield Fault(f"states of {states[real[0]]}", QUANTIZATION, CONFIG, real)
    bare = [
        key
        for key, tensor in tensors.items()
        if len(tensor.shape) in (2, 3) and tensor.dtype in _BYTES and tensor.numel
    ]
    if bare and not states and method in ("", "fp8", "fbgemm_fp8"):
        text = f"{len(bare)} matrices of {tensors[bare[0]].dtype} without scales"
        yield Fault(text, "16-bit or 32-bit weights, or scales", tensors=bare)


@check(
    "QUANT_MERGED", INFO, needs=(MODEL, WHOLE),
    why="if an adapter was merged into it, its delta was rounded to 4 bits ('Merge lora module to "
    "4-bit linear may get different generations')",
    fix="merge into the dequantised weights and keep 16 bits: {again}",
    issues="peft #2321, peft #2105, peft #1043, unsloth-zoo PR #810",
)  # fmt: skip
def stored_in_four_bits(source: Source) -> Iterator[Fault]:
    """A model stored in 4 bits."""
    packed = any(_is_packed(key, source.tensors) for key in source.once(_states))
    if packed and _method(source) == _BITSANDBYTES and not source.once(_undecodable):
        yield Fault(stored(source.config()) or "", "nothing, if it is intended", file=CONFIG)


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


def _usual_dtype(source: Source) -> str:
    """Return the dtype of most bytes of the matrices; "" if scales and states have their own."""
    if source.is_model and stored(source.config()) is not None:
        return ""
    sizes = _matrix_bytes(_compared(source)).most_common(1)
    return sizes[0][0] if sizes else ""


def _compared(source: Source) -> dict[str, StoredTensor]:
    """Return the matrices of one dtype; many families keep norms, biases and gates in fp32.

    peft keeps LoRA pairs in fp32; modules that it stores in full have the base's dtype.
    """
    heads = (".score.", ".v_head.", ".gate.weight", ".router.")
    return {
        key: tensor
        for key, tensor in source.tensors.items()
        if (".lora_" in key if source.is_adapter else key.endswith(".weight"))
        and not any(part in f".{key}" for part in heads)
    }


@check(
    "DTYPE_MIXED", WARNING, needs=(either,),
    why="loaders cast all of them to one dtype: weights that were merged or trained in a wider "
    "dtype are rounded then, after all checks",
    fix="cast once, at the end of the merge, to the serving dtype",
    issues="LLaMA-Factory #2075, OpenRLHF PR #1348",
)  # fmt: skip
def mixed_dtypes(source: Source) -> Iterator[Fault]:
    """Weights of different dtypes."""
    usual, compared = source.once(_usual_dtype), _compared(source)
    odd = [k for k, tensor in compared.items() if _is_matrix(tensor) and tensor.dtype != usual]
    if usual and odd:
        sizes = _matrix_bytes(compared)
        shares = (f"{name} {nbytes / sizes.total():.0%}" for name, nbytes in sizes.items())
        yield Fault(f"{', '.join(shares)} of the bytes", usual, tensors=odd)


@check(
    "DTYPE_DIFFERS", WARNING, needs=(MODEL,),
    why="vLLM casts to the dtype of config.json, and an exporter may have cast already: bf16 "
    "weights in fp16 overflow, fp32 weights lose their precision, small deltas are rounded away",
    fix="merge again in the base's dtype, or set dtype in config.json to that of the weights",
    issues="LLaMA-Factory #2075, LLaMA-Factory #3096, LLaMA-Factory #10596",
)  # fmt: skip
def other_dtype(source: Source) -> Iterator[Fault]:
    """Weights of another dtype than config.json says, or than the base."""
    usual, config, base = source.once(_usual_dtype), source.config(), source.base
    dtype = of_text(config, "dtype") or of_text(config, "torch_dtype")
    wanted = DTYPE_NAMES.get(dtype, usual) if isinstance(dtype, str) else usual
    texts = [f"dtype {dtype} in {CONFIG}"] if usual and wanted != usual else []
    if usual and base is not None and base.is_model and stored(base.config()) is None:
        sizes = _matrix_bytes(base.tensors).most_common(1)
        texts += [f"the base has {sizes[0][0]}"] if sizes and sizes[0][0] != usual else []
    if texts:
        yield Fault(f"{usual} weights, {'; '.join(texts)}", "the same", file=CONFIG)


def _matrix_bytes(tensors: Mapping[str, StoredTensor]) -> Counter[str]:
    """Return the number of bytes of matrices by dtype."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        if _is_matrix(tensor):
            sizes[tensor.dtype] += tensor.nbytes
    return sizes


def _is_matrix(tensor: StoredTensor) -> bool:
    return len(tensor.shape) >= 2 and tensor.dtype in _FLOATS and tensor.nbytes > 0
