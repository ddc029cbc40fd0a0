"""Settings: those that decide what the weights compute, and those of generation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.audit.check import BASE, ERROR, INFO, MODEL, WARNING, Fault, check, either
from tasks.audit.checks.templates import SETTINGS
from tasks.audit.checks.tokens import GENERATION, GENERIC_TOKENIZER
from tasks.audit.known import of_text, text_config, token_ids
from tasks.audit.source import CONFIG, Source, setting
from tasks.audit.tensor_names import embeddings_of, plain_tensors

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
_NEW_TOKENIZER = "TokenizersBackend"
_ALIASES = (
    ("dtype", "torch_dtype"), ("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer"),
    ("num_attention_heads", "n_head"), ("max_position_embeddings", "n_positions"),
)  # fmt: skip
"""Names of which loaders take the first."""
_SHAPES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
"""Settings of the language model that loaders do not read beside `text_config`."""

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
_MAY_CHANGE = (
    (CONFIG, "max_position_embeddings"), (CONFIG, "bos_token_id"),
    (SETTINGS, "add_bos_token"), (SETTINGS, "add_eos_token"), (SETTINGS, "add_prefix_space"),
    *(("preprocessor_config.json", name) for name in (
        "image_processor_type", "image_mean", "image_std", "rescale_factor", "patch_size",
        "merge_size", "temporal_patch_size", "size", "crop_size", "do_resize", "do_rescale",
        "do_normalize",
    )),
)  # fmt: skip
"""Settings that training may change on purpose, by file."""


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
    lost = _old_rope(text)
    default = _THETAS.get(str(text.get("model_type")), _THETA)
    same = lost.get("rope_theta") in (None, default) and "rope_scaling" not in lost
    if lost and "rope_theta" not in text and not same:
        actual, fix = f"no rope_theta: read as {default:.0f}", setting(CONFIG, **lost)
        yield Fault(actual, fix, CONFIG, ["rope_parameters"], fix=fix)
    dtype = of_text(config, "dtype")
    if isinstance(dtype, str) and dtype != "float32" and not of_text(config, "torch_dtype"):
        fix = setting(CONFIG, torch_dtype=dtype)
        yield Fault(f"dtype {dtype}, and no torch_dtype", fix, CONFIG, fix=fix)


def _old_rope(text: Mapping[str, Any]) -> dict[str, Any]:
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


def _by_layer(settings: Mapping[str, Any]) -> bool:
    """Return True if rotary settings are given per kind of layer."""
    return any(isinstance(value, Mapping) for value in settings.values())


@check(
    "SETTING_TWICE", WARNING, needs=(MODEL,),
    why="loaders take one of them without a word, and other versions the other",
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


def rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary settings under uniform names, whichever version wrote them.

    `theta`, `type`, and where they are set `local theta`, `partial factor`, `factor`, ...
    """
    text = text_config(config)
    new, theta = text.get("rope_parameters"), of_text(config, "rope_theta")
    settings, local = text.get("rope_scaling"), text.get("rope_local_base_freq")
    if isinstance(new, Mapping):
        full, part = new.get("full_attention"), new.get("sliding_attention")
        if isinstance(part, Mapping):
            local = part.get("rope_theta", local)
        settings = full if isinstance(full, Mapping) else new
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


@check(
    "ROPE_THETA_ABSENT", WARNING, needs=(MODEL,),
    why="loaders use 10,000 without a warning: worse responses, most of all to long prompts",
    fix="add the base's rope_theta to config.json, 1000000.0 mostly",
)  # fmt: skip
def rope_theta_absent(source: Source) -> Iterator[Fault]:
    """config.json has no rope_theta, unlike the published models of its family."""
    config, text = source.config(), text_config(source.config())
    present = {"rope_theta", "rope_scaling", "rotary_emb_base"} & {*text, *config}
    if isinstance(text.get("rope_parameters"), Mapping) or "rope_theta" in present:
        return
    if str(text.get("model_type")) in _ALWAYS_SET:
        fix, base = "", source.base if source.has_base else None
        if base is not None:
            fix = setting(CONFIG, rope_theta=rope(base.config()).get("theta"))
        yield Fault("absent", "the base's, 1000000.0 mostly", CONFIG, ["rope_theta"], fix=fix)


@check(
    "CONFIG_CHANGED", ERROR, needs=(either, BASE),
    why="training does not change this: the weights compute something else, without an error",
    fix="take the base's value, unless the change is intended",
)  # fmt: skip
def config_changed(source: Source) -> Iterator[Fault]:
    """A setting that differs from the base's; a warning where training may change it."""
    base = source.base
    if base is None:
        return
    if source.is_model and source.config() and base.config():
        yield from _computed(source, base)
    mine, others = (_class_of(each.config(SETTINGS)) for each in (source, base))
    # Where the base names the general class, transformers 5 writes that of the family.
    others = None if others == GENERIC_TOKENIZER.removesuffix("Fast") else others
    rows = [(SETTINGS, "tokenizer_class", mine, others)]
    rows += [
        (file, name, of_text(source.config(file), name), of_text(base.config(file), name))
        for file, name in _MAY_CHANGE
        if file == SETTINGS or source.is_model
    ]
    for file, name, value, expected in rows:
        if value != expected and value is not None and expected is not None:
            severity = INFO if name == "max_position_embeddings" else WARNING
            text = f"{expected!r}, as the base has"
            yield Fault(repr(value), text, file, [name], severity)


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


def _class_of(settings: Mapping[str, Any]) -> str | None:
    """Return the tokenizer class without the suffix Fast; None for that of transformers 5."""
    name = settings.get("tokenizer_class")
    known = isinstance(name, str) and name != _NEW_TOKENIZER
    return str(name).removesuffix("Fast") if known else None


_ALLOWED: Mapping[str, tuple[str, float, float]] = {
    # setting: (words, least, most) of vLLM 0.32 and transformers 5
    "temperature": ("0 to 2", 0.0, 2.0),
    "top_p": ("above 0, at most 1", math.nextafter(0.0, 1.0), 1.0),
    "min_p": ("0 to 1", 0.0, 1.0),
    "top_k": ("-1, 0 or more", -1.0, math.inf),
    "repetition_penalty": ("above 0", math.nextafter(0.0, 1.0), math.inf),
}
_COLD, _PENALTY = 0.05, 1.5
"""A temperature below which sampling is greedy in practice, and a penalty from which on answers
avoid the words of the question."""


@check(
    "GENERATION_SETTINGS", WARNING, needs=(MODEL,),
    why="vLLM samples by it: it refuses each request with a value out of range",
    fix="write the settings of the base, or remove them",
    issues="vLLM #15241, lm-evaluation-harness PR #3160",
)  # fmt: skip
def generation_settings(source: Source) -> Iterator[Fault]:
    """Sampling defaults that servers refuse, or that decide every answer."""
    settings = source.config(GENERATION)
    for name, (words, least, most) in _ALLOWED.items():
        value = settings.get(name)
        if isinstance(value, int | float) and not least <= value <= most:
            yield Fault(f"{name} {value}", words, file=GENERATION, severity=ERROR)
    base = source.base.config(GENERATION) if source.base is not None else {}
    temperature, penalty = settings.get("temperature"), settings.get("repetition_penalty")
    odd = []
    if isinstance(temperature, int | float) and 0 < temperature < _COLD:
        odd.append(("temperature", temperature, f"0, or {_COLD} or more"))
    if isinstance(penalty, int | float) and penalty > _PENALTY:
        odd.append(("repetition_penalty", penalty, f"1 to {_PENALTY}"))
    for name, value, words in odd:
        if base.get(name) != value:
            yield Fault(f"{name} {value}", words, file=GENERATION)
