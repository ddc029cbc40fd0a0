"""Check settings that decide what the weights compute and that files omit or change.

Without a base: rotary settings, tokenizer class and processor that some readers do not find.
With a base: every relevant setting that differs from the base's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tasks.audit.catalogue.model import Configuration
from tasks.audit.checks.text.embeddings import embeddings_of
from tasks.audit.checks.text.tokens import SETTINGS
from tasks.audit.config_fields import is_multimodal, of_text, text_config, token_ids
from tasks.audit.finding import Finding
from tasks.audit.recognise import CONFIG
from tasks.audit.source import Source

THETA = 10_000.0
"""Base frequency that loaders use if the file has none."""
_THETAS = {
    "exaone4": 1e6, "gemma3_text": 1e6, "gpt_oss": 150_000.0, "llama4_text": 5e5, "mixtral": 1e6,
}  # fmt: skip
"""Families with another default in transformers 4."""
_ALWAYS_SET = frozenset(
    {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mixtral", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"}
)
"""Families whose published models all have a rope_theta."""
GENERIC_TOKENIZER, NEW_TOKENIZER = "PreTrainedTokenizerFast", "TokenizersBackend"
_ALIASES = (
    ("dtype", "torch_dtype"), ("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer"),
    ("num_attention_heads", "n_head"), ("max_position_embeddings", "n_positions"),
)  # fmt: skip
"""Names of which loaders take the first."""
_SHAPES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
"""Settings of the language model that loaders do not read beside `text_config`."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")

COMPUTE = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps",
    "hidden_act", "hidden_activation", "activation_function",
    "query_pre_attn_scalar", "attention_multiplier", "attn_logit_softcapping",
    "final_logit_softcapping", "logits_scaling", "logit_scale", "embedding_multiplier",
    "residual_multiplier", "scale_attn_weights", "scale_attn_by_inverse_layer_idx",
    "attention_bias", "use_qk_norm", "layer_types", "no_rope_layers", "num_experts_per_tok",
    "norm_topk_prob", "routed_scaling_factor", "scoring_func", "n_group", "topk_group",
)  # fmt: skip
"""Settings of the language model that training does not change."""
_NEVER_ABSENT = COMPUTE[:8]
"""Settings that every writer saves. If one is absent, the loader uses its default."""
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
"""Settings of which null, or their absence, is a value: no cap."""
_INTENDED = ("max_position_embeddings",)
_TOKENIZER = ("add_bos_token", "add_eos_token", "add_prefix_space")
_PROCESSOR = (
    "image_processor_type", "image_mean", "image_std", "rescale_factor", "patch_size", "merge_size",
    "temporal_patch_size", "size", "crop_size", "do_resize", "do_rescale", "do_normalize",
)  # fmt: skip


def check(source: Source) -> Iterator[Finding]:
    """Report settings that some readers do not find, then settings that differ from the base's."""
    base = source.base
    if source.is_model or source.is_adapter:
        yield from _tokenizer_class(source)
        if base is not None and base.is_model:
            yield from _tokenizer(source.config(SETTINGS), base.config(SETTINGS))
    if not source.is_model or not source.config():
        return
    yield from _two_values(source.config())
    yield from _rope_form(source.config())
    yield from _processor(source)
    if base is not None and base.is_model and base.config():
        yield from _compute(source, base)
        yield from _ties(source, base)
        yield from _others(source, base)


def _tokenizer_class(source: Source) -> Iterator[Finding]:
    """Report the two things that transformers 5 writes and 4 does not load, as one finding."""
    settings = source.config(SETTINGS)
    more = settings.get("extra_special_tokens")
    new = {
        "tokenizer_class": repr(NEW_TOKENIZER) * (settings.get("tokenizer_class") == NEW_TOKENIZER),
        "extra_special_tokens": f"a list of {len(more)}" * bool(more) if isinstance(more, list)
        else "",
    }  # fmt: skip
    names = [name for name, value in new.items() if value]
    if names:
        yield Configuration.TOKENIZER_CLASS.at(
            SETTINGS, names, found="; ".join(new[name] for name in names),
            expected=f"{GENERIC_TOKENIZER!r}; the list as additional_special_tokens",
        )  # fmt: skip


def _two_values(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Report settings with two values: under two names, or in and beside `text_config`."""
    for taken, value, other, left in _spellings(config):
        if value is None or left is None or value == left:
            continue
        if taken == "eos_token_id" and {*token_ids(value)} & {*token_ids(left)}:
            continue  # a list, and one of its ids
        yield Configuration.SETTING_TWICE.at(
            CONFIG, taken, found=f"{taken} {value!r}, {other} {left!r}",
            expected=f"one value; transformers 5 takes {taken}",
        )  # fmt: skip


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
    if isinstance(old, Mapping):
        for key in [key for key in old if key not in ("type", "rope_type", "rope_theta")]:
            yield f"rope_scaling.{key}", old[key], f"rope_parameters.{key}", new.get(key)
        yield (
            "rope_scaling.rope_type",
            _rope_kind(old),
            "rope_parameters.rope_type",
            _rope_kind(new),
        )


def _rope_kind(rope: Mapping[str, Any]) -> str | None:
    """Return the kind under its present name; None if it is given per kind of layer."""
    if any(isinstance(value, Mapping) for value in rope.values()):
        return None
    kind = rope.get("rope_type", rope.get("type", "default"))
    return {"mrope": "default", "su": "longrope"}.get(str(kind), str(kind))


def _rope_form(config: Mapping[str, Any]) -> Iterator[Finding]:
    text = text_config(config)
    kind, new = str(text.get("model_type")), text.get("rope_parameters")
    if not isinstance(new, Mapping):
        present = {"rope_theta", "rope_scaling", "rotary_emb_base"} & {*text, *config}
        if kind in _ALWAYS_SET and "rope_theta" not in present:
            yield Configuration.ROPE_THETA_ABSENT.at(
                CONFIG, "rope_theta", found="absent", expected="the base's, 1000000.0 mostly"
            )
        return
    if "rope_theta" in text:
        return
    lost = old_rope(text)
    default = _THETAS.get(kind, THETA)
    if lost.get("rope_theta") in (None, default) and "rope_scaling" not in lost:
        return
    expected = ", ".join(f"{name} {value!r}" for name, value in lost.items())
    yield Configuration.ROPE_FORM.at(
        CONFIG, "rope_parameters", found=f"no rope_theta beside it: read as {default:.0f}",
        expected=expected,
    )  # fmt: skip


def old_rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `rope_parameters` of transformers 5 to the settings of transformers 4.

    Args:
        text: configuration of the language model.
    """
    new = text.get("rope_parameters")
    if not isinstance(new, Mapping):
        return {}
    if any(isinstance(value, Mapping) for value in new.values()):
        new = new.get("full_attention")
        if not isinstance(new, Mapping):
            return {}
    rest = {key: value for key, value in new.items() if key != "rope_theta"}
    old = {"rope_theta": new["rope_theta"]} if "rope_theta" in new else {}
    plain = rest.get("rope_type", "default") == "default" and "mrope_section" not in rest
    return old if plain else {**old, "rope_scaling": rest}


def _processor(source: Source) -> Iterator[Finding]:
    config = source.config()
    if not is_multimodal(config) or not source.tensors:
        return
    if not any(name in source.folder.files for name in PROCESSOR_FILES):
        yield Configuration.PROCESSOR_MISSING.at(
            PROCESSOR_FILES[0], found="absent", expected="that of the base"
        )


def _compute(source: Source, base: Source) -> Iterator[Finding]:
    """Report settings of the computation that differ from the base's, rotary ones included."""
    config, base_config = source.config(), base.config()
    for name in COMPUTE:
        ours, theirs = of_text(config, name), of_text(base_config, name)
        absent = name in _NEVER_ABSENT and name not in text_config(config)
        unknown = theirs is None or (ours is None and not absent)
        if ours == theirs or (unknown and name not in _CAPS):
            continue
        yield _changed(name, ours, theirs)
    ours, theirs = _rope(config), _rope(base_config)
    for name in sorted({*ours, *theirs} & {"theta", "type", "factor"} | {*ours} & {*theirs}):
        if ours.get(name) != theirs.get(name):
            yield _changed(f"rope {name}", ours.get(name), theirs.get(name))


def _changed(name: str, value: Any, expected: Any) -> Finding:
    shown = "absent" if value is None else repr(value)
    return Configuration.CONFIG_CHANGED.at(
        CONFIG, name, found=shown, expected=f"{expected!r}, as the base has"
    )


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary settings under uniform names, whichever version wrote them."""
    text = text_config(config)
    new = text.get("rope_parameters")
    theta: Any = of_text(config, "rope_theta")
    scaling: Any = text.get("rope_scaling")
    local: Any = text.get("rope_local_base_freq")
    if isinstance(new, Mapping):
        whole, part = new.get("full_attention"), new.get("sliding_attention")
        if isinstance(part, Mapping):
            local = part.get("rope_theta", local)
        scaling = whole if isinstance(whole, Mapping) else new
        theta = scaling.get("rope_theta", theta)
    settings = dict(scaling) if isinstance(scaling, Mapping) else {}
    kind = settings.pop("rope_type", settings.pop("type", "default"))
    settings.pop("type", None)
    settings.pop("rope_theta", None)
    settings["type"] = "default" if kind == "mrope" else kind
    settings["theta"] = THETA if theta is None and "rope_parameters" not in text else theta
    partial = settings.pop("partial_rotary_factor", of_text(config, "partial_rotary_factor"))
    more = {"partial factor": partial, "local theta": local}
    settings |= {name: value for name, value in more.items() if value is not None}
    return {
        name: float(value) if type(value) is int else value
        for name, value in settings.items()
        if value is not None
    }


def _ties(source: Source, base: Source) -> Iterator[Finding]:
    name = "tie_word_embeddings"
    ours, theirs = source.config().get(name), base.config().get(name)
    if not isinstance(ours, bool) or not isinstance(theirs, bool) or ours == theirs:
        return
    has_head = bool(embeddings_of(source.tensors, source.config()).output)
    if ours or not (has_head or not source.weights.is_whole):
        yield _changed(name, ours, theirs)


def _others(source: Source, base: Source) -> Iterator[Finding]:
    """Report differences that training may intend, and settings that saving may lose."""
    ours, theirs = source.config(), base.config()
    for name in _INTENDED:
        yield from _differs(CONFIG, name, of_text(ours, name), of_text(theirs, name))
    yield from _differs(CONFIG, "sliding_window", _window(ours), _window(theirs), absent=True)
    bos = of_text(ours, "bos_token_id"), of_text(theirs, "bos_token_id")
    yield from _differs(CONFIG, "bos_token_id", *bos)
    ids, base_ids = (token_ids(of_text(config, "eos_token_id")) for config in (ours, theirs))
    if ids and base_ids and not {*ids} & {*base_ids}:
        yield from _differs(CONFIG, "eos_token_id", list(ids), list(base_ids))
    processor = PROCESSOR_FILES[0]
    ours, theirs = source.config(processor), base.config(processor)
    for name in _PROCESSOR:
        yield from _differs(processor, name, ours.get(name), theirs.get(name))


def _tokenizer(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[Finding]:
    yield from _differs(SETTINGS, "tokenizer_class", _class_of(ours), _class_of(theirs))
    for name in _TOKENIZER:
        yield from _differs(SETTINGS, name, ours.get(name), theirs.get(name))


def _differs(
    file: str, name: str, ours: Any, theirs: Any, *, absent: bool = False
) -> Iterator[Finding]:
    if ours == theirs or (not absent and (ours is None or theirs is None)):
        return
    yield Configuration.CONFIG_DIFFERS.at(
        file, name, found=repr(ours), expected=f"{theirs!r}, as the base has"
    )


def _window(config: Mapping[str, Any]) -> Any:
    """Return the sliding window in use; None if there is none."""
    used = of_text(config, "use_sliding_window") is not False
    return of_text(config, "sliding_window") if used else None


def _class_of(settings: Mapping[str, Any]) -> str | None:
    """Return the tokenizer class without the suffix Fast; None for that of `TOKENIZER_CLASS`."""
    name = settings.get("tokenizer_class")
    known = isinstance(name, str) and name != NEW_TOKENIZER
    return str(name).removesuffix("Fast") if known else None
