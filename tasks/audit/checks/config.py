"""Settings: what the weights compute, generation; dtypes and quantisation of what is stored."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.audit.check import BASE, ERROR, INFO, MODEL, WARNING, WHOLE, Fault, check, either
from tasks.audit.checks.names import is_declared_elsewhere
from tasks.audit.checks.tokens import GENERATION, GENERIC_TOKENIZER
from tasks.audit.known import (
    SETTINGS,
    TOWER,
    embeddings_of,
    of_text,
    plain_tensors,
    tail_of,
    text_config,
    texts,
)
from tasks.audit.source import CONFIG, Source, setting
from tasks.weights.files.dtypes import DTYPE_NAMES, ITEM_BITS
from tasks.weights.files.tensors import Tensor, Tensors
from tasks.weights.quantized.config_fields import QUANTIZATION, group_weights, stored

_NEW_TOKENIZER = "TokenizersBackend"
"""Tokenizer class that transformers 5 writes."""
_THETA = 10_000.0
"""Base frequency that loaders use if the file has none."""
_THETAS = {
    "exaone4": 1e6, "gemma3_text": 1e6, "gpt_oss": 150_000.0, "llama4_text": 5e5, "mixtral": 1e6,
}  # fmt: skip
"""Families with another default in transformers 4."""
_COMPUTE = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps",
    "hidden_act", "hidden_activation", "activation_function",
    "query_pre_attn_scalar", "attention_multiplier", "attn_logit_softcapping",
    "final_logit_softcapping", "logits_scaling", "logit_scale", "embedding_multiplier",
    "residual_multiplier", "scale_attn_weights", "scale_attn_by_inverse_layer_idx",
    "attention_bias", "use_qk_norm", "layer_types", "no_rope_layers", "num_experts_per_tok",
    "norm_topk_prob", "routed_scaling_factor", "scoring_func", "n_group", "topk_group",
)  # fmt: skip
"""Settings of the language model that training does not change."""
_NEVER_ABSENT = _COMPUTE[:8]
"""Settings that every writer saves. If one is absent, the loader uses its default."""
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
"""Settings of which null, or their absence, is a value: no cap."""
_OF_PROMPTS = ("add_bos_token", "add_eos_token", "add_prefix_space")


@check(
    "TRANSFORMERS_4", INFO, needs=(either,),
    why="older versions do not load it, or use the default rope theta, or float32",
    fix="for such servers write what is expected beside it",
    issues="LLaMA-Factory #10310, minimind #578, QwenPaw #3084, vLLM PR #44158, "
    "unsloth-zoo PR #286",
)  # fmt: skip
def transformers_4(source: Source) -> Iterator[Fault]:
    """Settings of transformers 5 that transformers 4 does not load, or reads otherwise."""
    settings, config = source.config(SETTINGS), source.config() if source.is_model else {}
    if settings.get("tokenizer_class") == _NEW_TOKENIZER:
        fix = setting(SETTINGS, tokenizer_class=GENERIC_TOKENIZER)
        yield Fault(f"tokenizer_class {_NEW_TOKENIZER!r}", fix, SETTINGS, fix=fix)
    more = settings.get("extra_special_tokens")
    if more and isinstance(more, list):
        expected = "the list as additional_special_tokens"
        yield Fault(f"extra_special_tokens, a list of {len(more)}", expected, SETTINGS)
    text = text_config(config)
    scaling = dict(_new_rope(text) or {})
    theta = scaling.pop("rope_theta", None)
    default = _THETAS.get(str(text.get("model_type")), _THETA)
    scaled = scaling.get("rope_type", "default") != "default" or "mrope_section" in scaling
    if "rope_theta" not in text and (scaled or theta not in (None, default)):
        values = {} if theta is None else {"rope_theta": theta}
        fix = setting(CONFIG, **values, **({"rope_scaling": scaling} if scaled else {}))
        actual = f"read as {default:.0f}" + ", without its scaling" * scaled
        yield Fault(actual, fix, CONFIG, ["rope_parameters"], fix=fix)
    dtype = of_text(config, "dtype")
    if isinstance(dtype, str) and dtype != "float32" and not of_text(config, "torch_dtype"):
        fix = setting(CONFIG, torch_dtype=dtype)
        yield Fault(f"dtype {dtype}, and no torch_dtype", fix, CONFIG, fix=fix)


def _new_rope(text: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return `rope_parameters` of a language model, those of full attention; None without."""
    new = text.get("rope_parameters")
    if not isinstance(new, Mapping):
        return None
    full = new.get("full_attention")
    return full if isinstance(full, Mapping) else new


def rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary settings under uniform names, whichever version wrote them.

    `theta`, `type`, and where they are set `local theta`, `partial factor`, `factor`, ...
    """
    text = text_config(config)
    theta, local = of_text(config, "rope_theta"), text.get("rope_local_base_freq")
    settings = _new_rope(text)
    if settings is None:
        settings = text.get("rope_scaling")
    else:
        part = text["rope_parameters"].get("sliding_attention")
        local = part.get("rope_theta", local) if isinstance(part, Mapping) else local
        theta = settings.get("rope_theta", theta)
    settings = dict(settings) if isinstance(settings, Mapping) else {}
    kind = settings.pop("rope_type", settings.pop("type", "default"))
    settings.pop("type", None)
    settings.pop("rope_theta", None)
    settings["type"] = {"mrope": "default", "su": "longrope"}.get(str(kind), kind)
    settings["theta"] = _THETA if theta is None and "rope_parameters" not in text else theta
    partial = settings.pop("partial_rotary_factor", of_text(config, "partial_rotary_factor"))
    settings["partial factor"], settings["local theta"] = partial, local
    return {
        name: float(value) if type(value) is int else value
        for name, value in settings.items()
        if value is not None
    }


@check(
    "CONFIG_CHANGED", ERROR, needs=(either, BASE),
    why="training does not change this: the weights compute something else, without an error",
    fix="take the base's value, unless the change is intended",
)  # fmt: skip
def config_changed(source: Source) -> Iterator[Fault]:
    """A setting that differs from the base's; a warning where training may change it."""
    base = source.known_base
    if source.is_model and source.config() and base.config():
        yield from _computed(source, base)
    mine, others = (_tokenizer_class(each.config(SETTINGS)) for each in (source, base))
    # Where the base names the general class, transformers 5 writes that of the family.
    others = None if others == GENERIC_TOKENIZER.removesuffix("Fast") else others
    rows = {"tokenizer_class": (mine, others)}
    for name in _OF_PROMPTS:
        rows[name] = source.config(SETTINGS).get(name), base.config(SETTINGS).get(name)
    for name, (value, expected) in rows.items():
        if value != expected and value is not None and expected is not None:
            text = f"{expected!r}, as the base has"
            yield Fault(repr(value), text, SETTINGS, [name], WARNING)


def _computed(source: Source, base: Source) -> Iterator[Fault]:
    """Yield the settings that the weights depend on."""
    ours, theirs = source.config(), base.config()
    for name in _COMPUTE:
        value, expected = of_text(ours, name), of_text(theirs, name)
        absent = name in _NEVER_ABSENT and name not in text_config(ours)
        unknown = expected is None or (value is None and not absent)
        if value != expected and (not unknown or name in _CAPS):
            yield _changed(name, value, expected)
    mine, others = rope(ours), rope(theirs)
    always = {"theta", "type", "factor"} & (mine.keys() | others.keys())
    for name in sorted(always | (mine.keys() & others.keys())):
        if mine.get(name) != others.get(name):
            yield _changed(f"rope {name}", mine.get(name), others.get(name))
    name = "tie_word_embeddings"
    value, expected = ours.get(name), theirs.get(name)
    if isinstance(value, bool) and isinstance(expected, bool) and value != expected:
        has_head = bool(embeddings_of(source.once(plain_tensors), ours).output)
        if value or (source.weights.is_whole and not has_head):
            yield _changed(name, value, expected)
    window, expected = _window(ours), _window(theirs)
    if window != expected:
        text = f"{expected!r}, as the base has"
        yield Fault(repr(window), text, CONFIG, ["sliding_window"], WARNING)


def _changed(name: str, value: Any, expected: Any) -> Fault:
    key = {"rope theta": "rope_theta"}.get(name, name)
    fix = "" if " " in key else setting(CONFIG, **{key: expected})
    actual = "absent" if value is None else repr(value)
    return Fault(actual, f"{expected!r}, as the base has", CONFIG, [name], fix=fix)


def _window(config: Mapping[str, Any]) -> Any:
    """Return the sliding window in use; None if there is none."""
    used = of_text(config, "use_sliding_window") is not False
    return of_text(config, "sliding_window") if used else None


def _tokenizer_class(settings: Mapping[str, Any]) -> str | None:
    """Return the tokenizer class without the suffix Fast; None for that of transformers 5."""
    name = settings.get("tokenizer_class")
    known = isinstance(name, str) and name != _NEW_TOKENIZER
    return str(name).removesuffix("Fast") if known else None


_NONE = (math.inf, math.inf)
_SAMPLING = (
    # setting, the least and the most that vLLM 0.32 and transformers 5 take, what decides answers
    ("temperature", (0.0, 2.0), (0.0, 0.05), "0, or 0.05 to 2"),
    ("top_p", (1e-9, 1.0), _NONE, "above 0, at most 1"),
    ("min_p", (0.0, 1.0), _NONE, "0 to 1"),
    ("top_k", (-1.0, math.inf), _NONE, "-1, 0 or more"),
    ("repetition_penalty", (1e-9, math.inf), (1.5, math.inf), "above 0, at most 1.5"),
    ("max_new_tokens", (1.0, math.inf), (0.0, 256.0), "absent, or at least 256: it cuts responses"),
)


@check(
    "GENERATION_SETTINGS", WARNING, needs=(MODEL,),
    why="vLLM samples by it: it refuses each request with a value out of range",
    fix="write the settings of the base, or remove them",
    issues="vLLM #15241, lm-evaluation-harness PR #3160",
)  # fmt: skip
def generation_settings(source: Source) -> Iterator[Fault]:
    """Sampling defaults that servers refuse, or that decide every answer, unless the base's."""
    base = source.base.config(GENERATION) if source.base is not None else {}
    for name, (least, most), (low, high), words in _SAMPLING:
        value = source.config(GENERATION).get(name)
        if not isinstance(value, int | float):
            continue
        refused = not least <= value <= most
        if refused or (low < value < high and base.get(name) != value):
            severity = ERROR if refused else None
            yield Fault(f"{name} {value}", words, file=GENERATION, severity=severity)


_STATE = re.compile(
    r"\.(absmax|quant_map|quant_state\..+|nested_absmax|SCB|qweight|qzeros|g_idx|weight_packed|"
    r"weight_global_scale|weight_scale(_inv)?)$|_proj_(blocks|scales)$"
)
"""Keys of what quantisation stores beside a weight, or in its place."""
_PACKING = ("bitsandbytes", "gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4")
"""Methods that store such keys, or packed dtypes."""
_BYTES = ("U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_PACKED = (*_BYTES, "I32")
_FLOATS = ("F64", "F32", "BF16", "F16")


@check(
    "QUANT_CONFIG", ERROR, needs=(MODEL, WHOLE),
    why="loaders quantise again, or read packed bytes as weights: 'size mismatch', or garbage",
    fix="remove it if the weights are not packed; else restore it, or merge in 16 bits: {again}",
    issues="open-instruct #427, peft #2321, unsloth-zoo PR #803, OpenRLHF #501, "
    "llm-compressor #1983, sglang PR #24929",
)  # fmt: skip
def quantisation(source: Source) -> Iterator[Fault]:
    """config.json and the tensors disagree about quantisation."""
    tensors, method = source.tensors, (stored(source.config()) or "").partition(",")[0]
    states = [key for key in tensors if _STATE.search(key)]
    real = [key for key in states if _is_packed(key, tensors)]
    residue = [key for key in states if key not in real]
    if residue:
        text = f"{len(residue)} quantisation states"
        yield Fault(text, "packed weights, or no states", tensors=residue)
    packed = any(tensor.dtype in _PACKED for tensor in tensors.values())
    if tensors and method in _PACKING and not states and not packed:
        text = f"{QUANTIZATION} of {stored(source.config())}, and no packed tensor"
        yield Fault(text, f"no {QUANTIZATION}", file=CONFIG)
    if is_declared_elsewhere(source):
        return
    if real and not method:
        yield Fault(f"{len(real)} quantisation states", QUANTIZATION, CONFIG, real)
    bare = [
        key
        for key, tensor in tensors.items()
        if len(tensor.shape) in (2, 3) and tensor.dtype in _BYTES and tensor.numel
    ]
    if bare and not states and method in ("", "fp8", "fbgemm_fp8"):
        text = f"{len(bare)} matrices of {tensors[bare[0]].dtype} without scales"
        yield Fault(text, "16-bit or 32-bit weights, or scales", tensors=bare)


def _is_packed(key: str, tensors: Tensors) -> bool:
    """Return True if the weight of a state is packed; assume so if the key names no weight."""
    weight = key.removesuffix("_inv").removesuffix("_scale")
    for mark in (".quant_", ".nested_", ".absmax"):
        weight = weight.partition(mark)[0]
    if key.endswith(".SCB"):
        weight = key.removesuffix("SCB") + "weight"
    tensor = tensors.get(weight)
    if weight == key or (tensor is None and "_scale" in key):
        return True  # such methods use other names for packed weights
    # bitsandbytes may pack into a float dtype: then the shape decides.
    return tensor is not None and (tensor.dtype in _PACKED or tensor.shape[1:] == (1,))


_LISTS = ("ignore", "ignored_layers", "modules_to_not_convert", "llm_int8_skip_modules")
_PACKED_AS = re.compile(r"(.+)\.(weight_packed|qweight|weight_scale(_inv)?|weight\.absmax|SCB)")
_SIMPLE = re.compile(r"re:\^?([\w.-]|\\\.|\.\*)*\$?")
"""Regular expressions that are matched: others can take long, or are none."""


@check(
    "QUANT_LAYOUT", ERROR, needs=(MODEL, WHOLE),
    why="loaders build layers by it: `KeyError` for a weight, random weights, or garbage",
    fix="write into config.json what the export used, or export again",
    issues="vLLM #11790, vLLM #25797, auto-round #422",
)  # fmt: skip
def quantised_layout(source: Source) -> Iterator[Fault]:
    """Modules in 16 bits, or sizes of groups of columns, are others than config.json says."""
    fields = source.config().get(QUANTIZATION)
    method = fields.get("quant_method") if isinstance(fields, Mapping) else None
    if fields is None or method not in ("awq", "gptq", "compressed-tensors", "bitsandbytes", "fp8"):
        return
    yield from _listed(source.tensors, fields)
    # Sizes of single modules, and AWQ's other layouts.
    other = (
        fields.get("dynamic") or fields.get("extra_config") or "gemv" in str(fields.get("version"))
    )
    if method in ("awq", "gptq", "compressed-tensors") and not other:
        yield from _group_sizes(source.tensors, fields)


def _listed(tensors: Tensors, fields: Mapping[str, Any]) -> Iterator[Fault]:
    """Compare the packed modules with the lists of those in 16 bits."""
    listed = [name for key in _LISTS for name in texts(fields.get(key))]
    patterns = [name for name in listed if name.startswith("re:")]
    if not all(_SIMPLE.fullmatch(each) and each.count("*") < 4 for each in patterns):
        return
    packed = {match[1] for key in tensors if (match := _PACKED_AS.fullmatch(key))}
    names = {name.removeprefix("model.") for name in listed}
    anywhere = "|".join(each[3:] for each in patterns)
    is_listed = {
        module: not names.isdisjoint(_inner(module))
        or bool(patterns and re.match(anywhere, module))
        for module in {*packed, *(key.removesuffix(".weight") for key in tensors)}
    }
    own = {module for module in packed if not module.startswith("mtp.")}  # layers by that name
    if wrong := sorted(module for module in own if is_listed[module]):
        yield Fault(f"{len(wrong)} packed modules are listed", "16 bits", CONFIG, wrong)
    leaves, tails = {name.rpartition(".")[2] for name in packed}, {*map(tail_of, listed)}
    if groups := (fields.get("config_groups") or {}).values():
        # compressed-tensors: other targets than all linear layers are its own business
        is_all = any("Linear" in group.get("targets", ()) for group in groups)
        leaves = leaves | {"lm_head"} if is_all else set()
    loose = {key.removesuffix(".weight") for key, t in tensors.items() if len(t.shape) == 2}
    wrong = sorted(
        module
        for module in loose - packed
        if not TOWER.search(module)
        if module.rpartition(".")[2] in leaves and not is_listed[module]
        if tail_of(module) not in tails and fields.get("quant_method") != "gptq"
    )
    if wrong:
        yield Fault(f"{len(wrong)} modules in 16 bits, not listed", "packed", CONFIG, wrong)


def _group_sizes(tensors: Tensors, fields: Mapping[str, Any]) -> Iterator[Fault]:
    """Compare the groups of columns that share a scale."""
    packs = fields.get("quant_method") != "awq"  # AWQ packs rows
    weights = group_weights(fields)
    sizes = [
        (each.get("group_size"), each.get("num_bits", each.get("bits")))
        for each in weights or [fields]
    ]
    key, at, axis = ("weight_packed", "weight_scale", 1) if weights else ("qweight", "scales", 0)
    others = defaultdict[int, list[str]](list)
    for name, matrix in tensors.items() if any(map(all, sizes)) else ():
        scale = tensors.get(f"{name.removesuffix(key)}{at}")
        if not name.endswith(f".{key}") or scale is None:
            continue
        if len(matrix.shape) != 2 or len(scale.shape) != 2:
            continue
        width, count = matrix.shape[axis], scale.shape[axis]
        item = ITEM_BITS[matrix.dtype]
        columns = {size: width * item // bits if packs else width for size, bits in sizes if bits}
        if count not in {-(-n // size) if size and size > 0 else 1 for size, n in columns.items()}:
            others[max(columns.values()) // count].append(name)
    for size, names in others.items():
        text = f"{', '.join(str(size) for size, _ in sizes)}, as config.json says"
        yield Fault(f"groups of {size}", text, CONFIG, names)


def _inner(module: str) -> Iterator[str]:
    """Yield all dotted parts of a name: `a.b` of `a.b.c`."""
    parts = module.split(".")
    return (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))


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
    matrices = _matrices(source)
    sizes = _bytes_by_dtype(matrices)
    if not sizes:
        return
    usual = sizes.most_common(1)[0][0]
    odd = [key for key, tensor in matrices.items() if tensor.dtype != usual]
    if odd:
        shares = (f"{name} {nbytes / sizes.total():.0%}" for name, nbytes in sizes.items())
        yield Fault(f"{', '.join(shares)} of the bytes", usual, tensors=odd)
    if source.is_adapter:
        return
    dtype = of_text(config, "dtype") or of_text(config, "torch_dtype")
    wanted = DTYPE_NAMES.get(dtype, usual) if isinstance(dtype, str) else usual
    others = [f"dtype {dtype} in {CONFIG}"] if wanted != usual else []
    if base is not None and base.is_model and stored(base.config()) is None:
        of_base = _bytes_by_dtype(_matrices(base)).most_common(1)
        others += [f"the base has {of_base[0][0]}"] if of_base and of_base[0][0] != usual else []
    if others:
        yield Fault(f"{usual} weights, {'; '.join(others)}", "the same", file=CONFIG)


def _matrices(source: Source) -> dict[str, Tensor]:
    """Return the matrices of one dtype; many families keep norms, biases and gates in fp32.

    peft keeps LoRA pairs in fp32; modules that it stores in full have the base's dtype.
    """
    heads = (".score.", ".v_head.", ".gate.weight", ".router.")
    return {
        key: tensor
        for key, tensor in source.tensors.items()
        if (".lora_" in key if source.is_adapter else key.endswith(".weight"))
        and not any(part in f".{key}" for part in heads)
        and (len(tensor.shape) >= 2 and tensor.dtype in _FLOATS and tensor.nbytes > 0)
    }


def _bytes_by_dtype(tensors: Tensors) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        sizes[tensor.dtype] += tensor.nbytes
    return sizes
