"""Settings that decide what the weights compute; dtypes and quantisation against the tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tasks.audit.check import BASE, ERROR, INFO, MODEL, WARNING, WHOLE, Fault, check, either
from tasks.audit.checks.names import embeddings_of, is_declared_elsewhere, plain_tensors
from tasks.audit.checks.tokens import GENERIC_TOKENIZER, name_tokenizer
from tasks.audit.folder import StoredTensor
from tasks.audit.known import is_multimodal, of_text, text_config, token_ids
from tasks.audit.repair import SETTINGS, Draft
from tasks.audit.source import CONFIG, Source, setting
from tasks.weights.files.dtypes import DTYPE_NAMES
from tasks.weights.quantized.config_fields import QUANTIZATION, stored

_THETA = 10_000.0
"""Base frequency that loaders use if the file has none."""
_THETAS = {
    "exaone4": 1e6, "gemma3_text": 1e6, "gpt_oss": 150_000.0, "llama4_text": 5e5, "mixtral": 1e6,
}  # fmt: skip
"""Families with another default in transformers 4."""
_ALWAYS_SET = frozenset(
    {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mixtral", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"}
)
"""Families whose published models all have a rope_theta."""
_ROPE = (
    "rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq",
    "partial_rotary_factor",
)  # fmt: skip
_NEW_TOKENIZER = "TokenizersBackend"
_ALIASES = (
    ("dtype", "torch_dtype"), ("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer"),
    ("num_attention_heads", "n_head"), ("max_position_embeddings", "n_positions"),
)  # fmt: skip
"""Names of which loaders take the first."""
_SHAPES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
"""Settings of the language model that loaders do not read beside `text_config`."""
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")

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
_TOKENIZER = ("add_bos_token", "add_eos_token", "add_prefix_space")
_PROCESSOR = (
    "image_processor_type", "image_mean", "image_std", "rescale_factor", "patch_size", "merge_size",
    "temporal_patch_size", "size", "crop_size", "do_resize", "do_rescale", "do_normalize",
)  # fmt: skip


@check(
    "TOKENIZER_CLASS", INFO, needs=(either,),
    why="'Tokenizer class TokenizersBackend does not exist or is not currently imported', or, for "
    "extra_special_tokens as a list, \"'list' object has no attribute 'keys'\": transformers 5 "
    "writes both, and older versions and servers built on them cannot load either",
    fix="for such servers name PreTrainedTokenizerFast, and move the list to "
    "additional_special_tokens, in tokenizer_config.json",
    issues="LLaMA-Factory #10310, minimind #578, QwenPaw #3084",
)  # fmt: skip
def tokenizer_class(source: Source) -> Iterator[Fault]:
    """Tokenizer settings that transformers 4 does not load."""
    settings = source.config(SETTINGS)
    more = settings.get("extra_special_tokens")
    new = [repr(_NEW_TOKENIZER)] if settings.get("tokenizer_class") == _NEW_TOKENIZER else []
    new += [f"extra_special_tokens, a list of {len(more)}"] if more and type(more) is list else []
    if new:
        expected = f"{GENERIC_TOKENIZER!r}; the list as additional_special_tokens"
        yield Fault("; ".join(new), expected, file=SETTINGS, repair=name_tokenizer)


@check(
    "SETTING_TWICE", WARNING, needs=(MODEL,),
    why="loaders take one of them without a word, and other versions the other: half of the "
    "readers compute something else than was trained",
    fix="delete the spelling with the value that is not meant",
)  # fmt: skip
def setting_twice(source: Source) -> Iterator[Fault]:
    """Two spellings of one setting with two values in config.json."""
    for taken, value, other, left in _spellings(source.config()):
        if value is None or left is None or value == left:
            continue
        if taken == "eos_token_id" and {*token_ids(value)} & {*token_ids(left)}:
            continue  # a list, and one of its ids
        text = f"{taken} {value!r}, {other} {left!r}"
        yield Fault(text, f"one value; transformers 5 takes {taken}", file=CONFIG)


def _spellings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield the name and value that transformers 5 takes, and those that it leaves (5.19)."""
    text = text_config(config)
    for name, other in _ALIASES:
        yield name, text.get(name), other, text.get(other)
    if text is not config:
        yield "dtype", config.get("dtype"), "torch_dtype", config.get("torch_dtype")
        for key in ("dtype", "eos_token_id"):
            yield key, config.get(key), f"{key} of the language model", text.get(key)
        for key in _SHAPES:
            yield f"{key} of the language model", text.get(key), key, config.get(key)
    new, old = text.get("rope_parameters"), text.get("rope_scaling")
    if not isinstance(new, Mapping):
        return
    yield "rope_parameters.rope_theta", new.get("rope_theta"), "rope_theta", text.get("rope_theta")
    if isinstance(old, Mapping) and not _by_layer(old) and not _by_layer(new):
        ours, theirs = rope({"rope_parameters": new}), rope({"rope_scaling": old})
        for key in theirs.keys() - {"theta"}:
            yield f"rope_scaling {key}", theirs[key], f"rope_parameters {key}", ours.get(key)


def _by_layer(settings: Mapping[str, Any]) -> bool:
    """Return True if rotary settings are given per kind of layer."""
    return any(isinstance(value, Mapping) for value in settings.values())


def rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary settings under uniform names, whichever version wrote them.

    `theta`, `type`, and where they are set `local theta`, `partial factor`, `factor`, ...
    """
    text = text_config(config)
    new, theta = text.get("rope_parameters"), of_text(config, "rope_theta")
    settings, local = text.get("rope_scaling"), text.get("rope_local_base_freq")
    if isinstance(new, Mapping):
        whole, part = new.get("full_attention"), new.get("sliding_attention")
        if isinstance(part, Mapping):
            local = part.get("rope_theta", local)
        settings = whole if isinstance(whole, Mapping) else new
        theta = settings.get("rope_theta", theta)
    settings = dict(settings) if isinstance(settings, Mapping) else {}
    kind = settings.pop("rope_type", settings.pop("type", "default"))
    settings.pop("type", None)
    settings.pop("rope_theta", None)
    settings["type"] = {"mrope": "default", "su": "longrope"}.get(str(kind), kind)
    settings["theta"] = _THETA if theta is None and "rope_parameters" not in text else theta
    settings["partial factor"] = settings.pop(
        "partial_rotary_factor", of_text(config, "partial_rotary_factor")
    )
    settings["local theta"] = local
    return {
        name: float(value) if type(value) is int else value
        for name, value in settings.items()
        if value is not None
    }


def old_rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `rope_parameters` of a language model to the settings of transformers 4."""
    new = text.get("rope_parameters")
    if isinstance(new, Mapping) and _by_layer(new):
        new = new.get("full_attention")
    if not isinstance(new, Mapping):
        return {}
    rest = {key: value for key, value in new.items() if key != "rope_theta"}
    old = {"rope_theta": new["rope_theta"]} if "rope_theta" in new else {}
    plain = rest.get("rope_type", "default") == "default" and "mrope_section" not in rest
    return old if plain else {**old, "rope_scaling": rest}


@check(
    "ROPE_THETA_ABSENT", WARNING, needs=(MODEL,),
    why="loaders use 10,000 without a warning. A model that was trained with another base "
    "frequency gives worse responses, most of all to long prompts",
    fix="add the base's rope_theta to config.json, 1000000.0 mostly",
)  # fmt: skip
def rope_theta_absent(source: Source) -> Iterator[Fault]:
    """config.json has no rope_theta, unlike the published models of its family."""
    config, text = source.config(), text_config(source.config())
    present = {"rope_theta", "rope_scaling", "rotary_emb_base"} & {*text, *config}
    if isinstance(text.get("rope_parameters"), Mapping) or "rope_theta" in present:
        return
    if str(text.get("model_type")) in _ALWAYS_SET:
        fix, expected = "", "the base's, 1000000.0 mostly"
        if source.has_base and source.base is not None:
            fix = setting(CONFIG, rope_theta=rope(source.base.config()).get("theta"))
        yield Fault("absent", expected, CONFIG, ["rope_theta"], fix=fix, repair=_take("rope"))


@check(
    "ROPE_FORM", INFO, needs=(MODEL,),
    why="transformers 4, and servers built on it, do not read rope_parameters: they use the "
    "default theta and no scaling, without a warning",
    fix="for such servers write rope_theta and rope_scaling beside rope_parameters",
    issues="vLLM PR #44158, vLLM PR #42624",
)  # fmt: skip
def rope_form(source: Source) -> Iterator[Fault]:
    """Rotary settings only in the format of transformers 5."""
    text = text_config(source.config())
    lost = old_rope(text)
    default = _THETAS.get(str(text.get("model_type")), _THETA)
    same = lost.get("rope_theta") in (None, default) and "rope_scaling" not in lost
    if lost and "rope_theta" not in text and not same:
        yield Fault(
            f"no rope_theta beside it: read as {default:.0f}",
            ", ".join(f"{name} {value!r}" for name, value in lost.items()),
            CONFIG, ["rope_parameters"], fix=setting(CONFIG, **lost), repair=write_old_rope,
        )  # fmt: skip


def write_old_rope(draft: Draft) -> None:
    """Add the rotary settings of transformers 4 beside those of transformers 5."""
    text = text_config(draft.documents.get(CONFIG, draft.source.config()))
    old = old_rope(text)
    if old and not old.items() <= text.items():
        _edit_text(draft, old)
        draft.done.append(f"{CONFIG}: {', '.join(old)} beside rope_parameters")


def _take(name: str) -> Callable[[Draft], None]:
    """Return the repair that copies a setting, or all rotary ones, from the base."""

    def repair(draft: Draft) -> None:
        base = draft.source.base
        if base is None:
            return
        if name in _COMPUTE:
            wanted = {name: of_text(base.config(), name)}
        elif name == "rope":
            wanted = {key: text_config(base.config()).get(key) for key in _ROPE}
        else:
            return
        text = text_config(draft.documents.get(CONFIG, draft.source.config()))
        if {key: text.get(key) for key in wanted} == wanted:
            return  # another finding of the same setting
        _edit_text(draft, wanted)
        values = ", ".join(f"{key} {value!r}" for key, value in wanted.items() if value is not None)
        draft.done.append(f"{CONFIG}: {values}, as the base has")
        write_old_rope(draft)

    return repair


def _edit_text(draft: Draft, changes: Mapping[str, Any]) -> None:
    """Change settings of the language model; None removes one."""
    config = {**draft.documents.get(CONFIG, draft.source.config())}
    inner = text_config(config)
    at = next((name for name, value in config.items() if value is inner), "")
    edited = {**(inner if at else config), **changes}
    edited = {k: v for k, v in edited.items() if v is not None or k not in changes}
    draft.documents[CONFIG] = {**config, at: edited} if at else edited


@check(
    "PROCESSOR_MISSING", WARNING, needs=(MODEL,),
    why="vLLM, SGLang and AutoProcessor cannot load it: 'does not appear to have a file named "
    "preprocessor_config.json'",
    fix="copy preprocessor_config.json and processor_config.json from the base",
    issues="EasyR1 PR #48, llm-compressor #1305",
)  # fmt: skip
def processor_missing(source: Source) -> Iterator[Fault]:
    """A multimodal model without a processor configuration."""
    there = any(name in source.folder.files for name in _PROCESSOR_FILES)
    if is_multimodal(source.config()) and source.tensors and not there:
        yield Fault("absent", "that of the base", file=_PROCESSOR_FILES[0])


def has_configs(source: Source) -> bool:
    """Return True for a model with a base, both with their configuration."""
    base = source.base
    return source.is_model and base is not None and bool(source.config() and base.config())


@check(
    "CONFIG_CHANGED", ERROR, needs=(has_configs, BASE),
    why="training does not change this setting. With another value the weights compute something "
    "else: the model loads and gives worse responses, often only to long prompts",
    fix="take the base's value",
)  # fmt: skip
def config_changed(source: Source) -> Iterator[Fault]:
    """A setting that the weights depend on differs from the base's."""
    config, base = source.config(), source.base.config() if source.base is not None else {}
    for name in _COMPUTE:
        ours, theirs = of_text(config, name), of_text(base, name)
        absent = name in _NEVER_ABSENT and name not in text_config(config)
        unknown = theirs is None or (ours is None and not absent)
        if ours != theirs and (not unknown or name in _CAPS):
            yield _changed(name, ours, theirs)
    mine, others = rope(config), rope(base)
    always = {"theta", "type", "factor"} & (mine.keys() | others.keys())
    for name in sorted(always | (mine.keys() & others.keys())):
        if mine.get(name) != others.get(name):
            yield _changed(f"rope {name}", mine.get(name), others.get(name))
    name = "tie_word_embeddings"
    ours, theirs = config.get(name), base.get(name)
    if isinstance(ours, bool) and isinstance(theirs, bool) and ours != theirs:
        has_head = bool(embeddings_of(source.once(plain_tensors), config).output)
        if ours or not (has_head or not source.weights.is_whole):
            yield _changed(name, ours, theirs)


def _changed(name: str, value: Any, expected: Any) -> Fault:
    is_rope = name.startswith("rope ")
    key = {"rope theta": "rope_theta"}.get(name, name)
    return Fault(
        "absent" if value is None else repr(value), f"{expected!r}, as the base has",
        CONFIG, [name], repair=_take("rope" if is_rope else name),
        fix="" if is_rope and key == name else setting(CONFIG, **{key: expected}),
    )  # fmt: skip


@check(
    "CONFIG_DIFFERS", WARNING, needs=(either, BASE),
    why="context length, special tokens, tokenizer or processor differ from the base's: changed on "
    "purpose, or lost when the model was saved",
    fix="compare with the settings of the run; take the base's value unless the change is intended",
)  # fmt: skip
def config_differs(source: Source) -> Iterator[Fault]:
    """A setting that training may change differs from the base's."""
    base = source.base
    if base is None:
        return
    mine, others = source.config(SETTINGS), base.config(SETTINGS)
    # Where the base names the general class, transformers 5 writes that of the family.
    general, named = GENERIC_TOKENIZER.removesuffix("Fast"), _class_of(others)
    named = None if named == general else named
    rows = [(SETTINGS, "tokenizer_class", _class_of(mine), named)]
    rows += [(SETTINGS, name, mine.get(name), others.get(name)) for name in _TOKENIZER]
    if has_configs(source):
        ours, theirs, file = source.config(), base.config(), _PROCESSOR_FILES[0]
        windows = _window(ours), _window(theirs)
        if windows[0] != windows[1]:
            yield _differs(CONFIG, "sliding_window", *windows)
        name = "max_position_embeddings"
        rows.append((CONFIG, name, of_text(ours, name), of_text(theirs, name)))
        name = "bos_token_id"
        rows.append((CONFIG, name, of_text(ours, name), of_text(theirs, name)))
        mine, others = source.config(file), base.config(file)
        rows += [(file, name, mine.get(name), others.get(name)) for name in _PROCESSOR]
    for file, name, value, expected in rows:
        if value != expected and value is not None and expected is not None:
            yield _differs(file, name, value, expected)


def _differs(file: str, name: str, value: Any, expected: Any) -> Fault:
    severity = INFO if name == "max_position_embeddings" else None  # often extended on purpose
    text = f"{expected!r}, as the base has"
    return Fault(repr(value), text, file, [name], severity=severity)


def _window(config: Mapping[str, Any]) -> Any:
    """Return the sliding window in use; None if there is none."""
    used = of_text(config, "use_sliding_window") is not False
    return of_text(config, "sliding_window") if used else None


def _class_of(settings: Mapping[str, Any]) -> str | None:
    """Return the tokenizer class without the suffix Fast; None for that of `TOKENIZER_CLASS`."""
    name = settings.get("tokenizer_class")
    known = isinstance(name, str) and name != _NEW_TOKENIZER
    return str(name).removesuffix("Fast") if known else None


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
    issues="open-instruct #427, peft #2321, unsloth-zoo PR #803",
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
    issues="peft #2321, peft #2105, peft #1043",
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
