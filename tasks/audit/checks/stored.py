"""Dtypes and quantisation: how the weights are stored, against config.json and the base."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.audit.check import ERROR, INFO, MODEL, WARNING, WHOLE, Fault, check, either, some
from tasks.audit.checks.names import is_declared_elsewhere
from tasks.audit.folder import StoredTensor
from tasks.audit.known import of_text, texts, whole
from tasks.audit.source import CONFIG, Source
from tasks.weights.files.dtypes import DTYPE_NAMES
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
_PER_WORD = 8
"""4-bit weights in a packed integer."""


@check(
    "QUANT_CONFIG", ERROR, needs=(MODEL, WHOLE),
    why="loaders quantise again, or read packed bytes as weights: 'size mismatch', or garbage",
    fix="remove it if the weights are not packed; else restore it, or merge in 16 bits: {again}",
    issues="open-instruct #427, peft #2321, unsloth-zoo PR #803, OpenRLHF #501, "
    "llm-compressor #1983, sglang PR #24929, imp PR #1970",
)  # fmt: skip
def quantisation(source: Source) -> Iterator[Fault]:
    """config.json and the tensors disagree about quantisation; an info for a model in 4 bits."""
    method = (stored(source.config()) or "").partition(",")[0]
    states = {key: kind for key in source.tensors if (kind := _method_of(key))}
    real = [key for key in states if _is_packed(key, source.tensors)]
    residue = [key for key in states if key not in real]
    if residue:
        text = f"{len(residue)} quantisation states"
        yield Fault(text, "packed weights, or no states", tensors=residue)
    known = {_weight_of(key) for key in real}
    lost = [
        key
        for key, tensor in source.tensors.items()
        if key.endswith(".weight") and tensor.dtype == "U8" and key not in known
    ]
    if lost and method == _BITSANDBYTES:
        text = f"{len(lost)} packed weights without a state"
        yield Fault(text, "absmax, quant_map and quant_state of each", tensors=lost)
    elif real and method == _BITSANDBYTES:
        why = "if an adapter was merged into it, its delta was rounded to 4 bits"
        fix = "merge into the dequantised weights and keep 16 bits"
        text = f"stored as {stored(source.config())}"
        yield Fault(text, "nothing, if it is intended", CONFIG, (), INFO, why, fix)
    yield from _undeclared(source, method, states, real)
    settings = source.config().get(QUANTIZATION)
    if isinstance(settings, Mapping):
        yield from _wrong_shapes(source, settings)


def _undeclared(
    source: Source, method: str, states: Mapping[str, str], real: list[str]
) -> Iterator[Fault]:
    """Yield packed tensors that config.json does not declare, and the reverse."""
    tensors = source.tensors
    packed = any(tensor.dtype in _PACKED_DTYPES for tensor in tensors.values())
    if tensors and method in _STATES and not states and not packed:
        text = f"{QUANTIZATION} of {stored(source.config())}, and no packed tensor"
        yield Fault(text, f"no {QUANTIZATION}", file=CONFIG)
    if is_declared_elsewhere(source):
        return
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


def _wrong_shapes(source: Source, settings: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield names and group sizes in quantization_config that do not fit the tensors."""
    modules = {key.rpartition(".")[0] for key in source.tensors}
    for name in ("ignore", "modules_to_not_convert"):
        listed = texts(settings.get(name))
        # A list may name towers that this model lacks, beside what it has.
        if listed and not any(_is_there(each, modules) for each in listed):
            text, expected = f"{name}: {some(listed)}", "modules of this model"
            yield Fault(text, expected, file=CONFIG, severity=WARNING)
    size, wrong = _group_size(settings), list[str]()
    for key, packed in source.tensors.items():
        scale = source.tensors.get(key.replace("_packed", "_scale"))
        if not size or not key.endswith(".weight_packed") or scale is None:
            continue
        if scale.shape[-1] * size != packed.shape[-1] * _PER_WORD:
            wrong.append(key)
    if wrong:
        text = f"{len(wrong)} matrices with other scales"
        yield Fault(text, f"a scale for {size} columns each", tensors=wrong)


def _is_there(name: str, modules: set[str]) -> bool:
    """Return True if a name, or a pattern `re:...`, of an ignore list fits a module."""
    if name.startswith("re:"):
        try:
            pattern = re.compile(name.removeprefix("re:"))
        except re.error:
            return False
        return any(pattern.match(module) for module in modules)
    name = name.removesuffix(".linear")  # as llm-compressor names wrapped layers
    return name.endswith("lm_head") or any(name in module for module in modules)  # may be tied


def _group_size(settings: Mapping[str, Any]) -> int:
    """Return the group size of compressed-tensors' 4-bit weights; 0 for none."""
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("num_bits") == 4:
            return whole(weights.get("group_size")) or 0
    return 0


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


@check(
    "DTYPE_DIFFERS", WARNING, needs=(either,),
    why="loaders cast to one dtype: fp16 overflows, fp32 loses precision, after all checks",
    fix="cast once, at the end of the merge, to the base's dtype; name that in config.json",
    issues="LLaMA-Factory #2075, LLaMA-Factory #3096, LLaMA-Factory #10596, OpenRLHF PR #1348",
)  # fmt: skip
def dtypes(source: Source) -> Iterator[Fault]:
    """Weights of different dtypes, or of another one than config.json says, or than the base."""
    config, base = source.config(), source.base
    if source.is_model and stored(config) is not None:
        return  # scales and states have their own
    compared = _compared(source)
    sizes = _matrix_bytes(compared)
    if not sizes:
        return
    ((usual, _),) = sizes.most_common(1)
    odd = [key for key, t in compared.items() if _is_matrix(t) and t.dtype != usual]
    if odd:
        shares = (f"{name} {nbytes / sizes.total():.0%}" for name, nbytes in sizes.items())
        yield Fault(f"{', '.join(shares)} of the bytes", usual, tensors=odd)
    if source.is_adapter:
        return
    dtype = of_text(config, "dtype") or of_text(config, "torch_dtype")
    wanted = DTYPE_NAMES.get(dtype, usual) if isinstance(dtype, str) else usual
    others = [f"dtype {dtype} in {CONFIG}"] if wanted != usual else []
    if base is not None and base.is_model and stored(base.config()) is None:
        of_base = _matrix_bytes(base.tensors).most_common(1)
        others += [f"the base has {of_base[0][0]}"] if of_base and of_base[0][0] != usual else []
    if others:
        yield Fault(f"{usual} weights, {'; '.join(others)}", "the same", file=CONFIG)


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


def _matrix_bytes(tensors: Mapping[str, StoredTensor]) -> Counter[str]:
    """Return the number of bytes of matrices by dtype."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        if _is_matrix(tensor):
            sizes[tensor.dtype] += tensor.nbytes
    return sizes


def _is_matrix(tensor: StoredTensor) -> bool:
    return len(tensor.shape) >= 2 and tensor.dtype in _FLOATS and tensor.nbytes > 0
