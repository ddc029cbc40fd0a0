"""Names and shapes of tensors, against the model's class, config.json and the base.

For decoders of common families `tasks.weights.model` derives every tensor from config.json
in milliseconds. Other classes are built by transformers in a child process, with values=true only.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.audit.check import ERROR, MODEL, WARNING, WHOLE, Fault, check
from tasks.audit.class_contract import perform_apart
from tasks.audit.known import (
    TOWER,
    adapter_name,
    cannot_rename,
    embeddings_of,
    first_architecture,
    is_multimodal,
    is_plain_text,
    known_classes,
    model_name,
    of_text,
    plain_tensors,
    tail_of,
    text_config,
    whole,
)
from tasks.audit.source import CONFIG, Kind, Source
from tasks.core.errors import ArtifactError
from tasks.drift.fingerprint import EXPERTS
from tasks.weights.files.names import PEFT_PREFIX, unwrap
from tasks.weights.heads import OPENRLHF
from tasks.weights.heads import WRAPPER as TRL_WRAPPER
from tasks.weights.model import model_facts, plain_model
from tasks.weights.model_class import oversized
from tasks.weights.quantized.config_fields import QUANTIZATION, stored

_PEFT = re.compile(
    r"(^|\.)(base_layer|lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|modules_to_save|"
    r"original_module|token_adapter)(\.|$)"
)
_OWN = "the model's own names"


def _keys(source: Source) -> list[str]:
    """Return the keys whose names can be wrong: not those of a value head beside an adapter."""
    if source.is_model:
        return list(source.tensors)
    return [key for key in source.tensors if source.is_adapter and "v_head." not in key]


@check(
    "WRAPPER_RESIDUE", ERROR,
    why="loaders know no such key: transformers starts at random, vLLM stops, peft only warns",
    fix="take the prefix off: {repair}",
    issues="OpenRLHF #991, Soup #335, axolotl #2744",
)  # fmt: skip
def wrapper_residue(source: Source) -> Iterator[Fault]:
    """Key prefixes of DeepSpeed, torch.compile, FSDP, or TRL's model with a value head."""
    wrapped = [
        key
        for key in _keys(source)
        if unwrap(key) != key or (source.is_model and key.startswith(TRL_WRAPPER))
    ]
    if wrapped:
        text, fixable = f"{len(wrapped)} keys with a wrapper's name", not cannot_rename(source)
        yield Fault(text, _OWN, tensors=wrapped, repairable=fixable)


@check(
    "PEFT_RESIDUE", ERROR,
    why="loaders know no such key: transformers starts at random, vLLM stops, peft only warns",
    fix="take them off: {repair}; if the adapter was never merged, deliver it as an adapter",
    issues="OpenRLHF #991, OpenRLHF #920, OpenRLHF #1081",
)  # fmt: skip
def peft_residue(source: Source) -> Iterator[Fault]:
    """Names of PEFT's wrapper in a model, or keys of an adapter that are not as PEFT saves them."""
    keys, expected = _keys(source), _OWN
    if source.is_model:
        wrong = [key for key in keys if PEFT_PREFIX in key or _PEFT.search(key)]
    else:
        wrong = [key for key in keys if adapter_name(key) != unwrap(key)]
        expected = adapter_name(wrong[0]) if wrong else ""
    if wrong:
        text = f"{len(wrong)} of {len(keys)} keys are those of a PEFT model in memory"
        yield Fault(text, expected, tensors=wrong, repairable=not cannot_rename(source))


@check(
    "ARCHITECTURE", ERROR, needs=(MODEL,),
    why="vLLM goes by the class, transformers by model_type: they load different models",
    fix="copy architectures and model_type from the base's config.json",
    issues="unsloth #1770, vLLM #15031",
)  # fmt: skip
def architecture(source: Source) -> Iterator[Fault]:
    """config.json names no class, or one that does not belong to model_type, or cannot be built."""
    config = source.config()
    name, kind, classes = first_architecture(config), config.get("model_type"), known_classes()
    if config and not name:
        yield Fault(repr(config.get("architectures")), "the model's class", file=CONFIG)
    of_class = {each for each, names in classes.items() if name in names}
    if of_class and isinstance(kind, str) and kind in classes and kind not in of_class:
        expected = f"model_type {' or '.join(sorted(of_class))}"
        yield Fault(f"{name} with model_type {kind!r}", expected, file=CONFIG)


_WRAPPED = re.compile(r"^(model\.)?language_model\.")
_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForSequenceClassification")
_TEXT_HEADS = _HEADS[:2]
_TEXT_KEYS = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
_BARE = ("layers.", "embed_tokens.", "norm.")


@check(
    "ARCHITECTURE_KEYS", ERROR, needs=(MODEL, WHOLE),
    why="vLLM and SGLang fail with KeyError; transformers starts at random, with a warning",
    fix="rename the keys to those of the base, or set the class that they belong to",
    issues="unsloth #1770, vLLM #15031, LLaMA-Factory #8241",
)  # fmt: skip
def architecture_keys(source: Source) -> Iterator[Fault]:
    """Keys that do not belong to the class."""
    config, keys = source.config(), list(source.once(plain_tensors))
    name = first_architecture(config)
    is_known = any(name in names for names in known_classes().values())
    if source.kind is Kind.VALUE or not keys or not is_known:
        return  # remote code may use any keys
    multimodal = is_multimodal(config)
    towers = [key for key in keys if TOWER.search(key)]
    wrapped = [key for key in keys if _WRAPPED.match(key)]
    short = [key for key in wrapped if key.removeprefix("language_model.").startswith(_BARE)]
    doubled = [key for key in keys if key.startswith("model.model.")]
    bare = [key for key in keys if key.startswith(_BARE)]
    # Some multimodal families store the language model's keys without a prefix.
    plain = name.endswith(_HEADS) and not any(key.startswith("model.") for key in keys)
    text_class = name.endswith(_TEXT_HEADS) and is_plain_text(config)
    outer = multimodal and name.endswith("ForConditionalGeneration")
    for wrong, is_wrong, text, expected in (
        (towers or wrapped, text_class, "keys of a multimodal model", f"those of {name}"),
        (keys, outer and all(key.startswith(_TEXT_KEYS) for key in keys),
         "keys of a language model alone", f"those of {name}, with its tower"),
        (short, outer, "language_model. without model.",
         f"those of {name}: language_model.model. or model.language_model."),
        (doubled, True, "a prefix twice", "model. once"),
        (bare, plain and not multimodal, "keys of a bare backbone", "the same behind model."),
    ):  # fmt: skip
        if wrong and is_wrong:
            yield Fault(text, expected, tensors=wrong)


_EXPERT = re.compile(r"(?P<at>.+\.experts)\.(?P<number>\d{1,6})\.(?P<part>.+)")
_IDENTITY = "zero_expert_num"
"""Setting of families with identity experts, which lack some or all tensors."""
_MOST = 10_000
"""Most experts of a layer, and most missing tensors, to examine: the files may be malicious."""
_MAX_TENSORS = 200_000
"""Most tensors of a model that transformers builds."""

Experts = dict[str, dict[int, set[str]]]
"""Parts of every expert, by the name of the layer's experts, then by number."""


def _experts(source: Source) -> Experts:
    """Return the experts that are stored one by one."""
    layers: Experts = {}
    for key in () if of_text(source.config(), _IDENTITY) else source.once(plain_tensors):
        if each := _EXPERT.fullmatch(key):
            layer = layers.setdefault(each["at"], {})
            layer.setdefault(int(each["number"]), set()).add(each["part"])
    return layers


def _expert_count(config: Mapping[str, Any]) -> int:
    """Return the number of routed experts per layer in config.json; 0 for none."""
    counts = (whole(of_text(config, name)) for name in EXPERTS)
    return next((count for count in counts if count), 0)


def _shapes(source: Source) -> Mapping[str, tuple[int, ...]] | str | None:
    """Return the shape of every tensor of the class by its key on disk.

    Returns None if they are not known or cannot be compared, and a text that says why if
    transformers cannot build the class.
    """
    config = source.config()
    if is_declared_elsewhere(source) or "ARCHITECTURE_KEYS" in source.codes or oversized(config):
        return None  # packed weights have other names and shapes
    facts = plain_model(_causal(config), "bfloat16", None)
    # Code that comes with a model is not run.
    name = first_architecture(config)
    served = source.kind is Kind.MODEL or name.endswith("ForSequenceClassification")
    plain = name and not config.get("auto_map") and not config.get("quantization_config")
    few = len(source.tensors) <= _MAX_TENSORS
    if facts is None and source.values and served and plain and few:
        disk = {key: tuple(tensor.shape) for key, tensor in source.tensors.items()}
        try:
            facts = perform_apart(model_facts, source.root, "bfloat16", disk)
        except ArtifactError as error:
            return error.message
    if facts is None:
        return None
    shapes = {tensor.name: tensor.shape for tensor in facts.tensors}
    if source.kind is Kind.REWARD:
        shapes.pop("lm_head.weight", None)  # the plain model is that of the language model
    return shapes


def _causal(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration with a language model's head; its other tensors are the same."""
    name = first_architecture(config).replace("ForSequenceClassification", "ForCausalLM")
    if name in OPENRLHF:
        kinds = known_classes().get(str(config.get("model_type")), ())
        name = next((name for name in sorted(kinds) if name.endswith("ForCausalLM")), "")
    return {**config, "architectures": [name]} if name else {}


_MODELOPT = "hf_quant_config.json"
"""Written by NVIDIA's exporter; config.json then says nothing about quantisation."""


def is_declared_elsewhere(source: Source) -> bool:
    """Return True if another file or key that vLLM reads says that the weights are packed."""
    config = source.config()
    beside = (text_config(config).get(QUANTIZATION), config.get("compression_config"))
    is_set = any(isinstance(settings, Mapping) and settings for settings in beside)
    return _MODELOPT in source.folder.files or (is_set and not config.get(QUANTIZATION))


_FUSED = re.compile(r".+\.experts\.(gate_up_proj|down_proj|gate_proj|up_proj)")
_STORED_EACH = frozenset(
    {
        "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "deepseek_v2", "deepseek_v3",
        "glm4_moe", "ernie4_5_moe", "minimax", "minimax_m2", "phimoe", "jamba", "flex_olmo",
    }
)  # fmt: skip
"""Families whose published checkpoints have one tensor per expert."""


@check(
    "EXPERTS_FUSED", WARNING, needs=(MODEL, WHOLE),
    why="transformers 5 packs experts in memory; saved like this, other tools do not find them",
    fix="write one tensor per expert, as save_pretrained of transformers 5 does",
    issues="vLLM PR #36997, vLLM PR #31849, MoE-Infinity PR #108",
)  # fmt: skip
def experts_fused(source: Source) -> Iterator[Fault]:
    """Experts fused in one tensor although the family stores one tensor per expert."""
    fused = [key for key in source.once(plain_tensors) if _FUSED.fullmatch(key)]
    mixed = bool(fused and source.once(_experts))
    if mixed or (fused and text_config(source.config()).get("model_type") in _STORED_EACH):
        text = f"{len(fused)} tensors of all experts{', the others one each' * mixed}"
        severity = ERROR if mixed else None
        yield Fault(text, "one tensor for each expert", tensors=fused, severity=severity)


@check(
    "TENSOR_MISSING", ERROR, needs=(MODEL, WHOLE),
    why="transformers initialises them at random with a warning; vLLM stops, or leaves them empty",
    fix="take them from the base if training did not change them; else save again",
    issues="OpenRLHF #1232, OpenRLHF #180, OpenRLHF #209",
)  # fmt: skip
def tensor_missing(source: Source) -> Iterator[Fault]:
    """Tensors of the class, or of the base, that are missing."""
    config, tensors, shapes = source.config(), source.once(plain_tensors), source.once(_shapes)
    if isinstance(shapes, str):  # transformers cannot build it: names and shapes are not checked
        expected = f"a class of {first_architecture(config)}"
        yield Fault(shapes, expected, file=CONFIG, severity=WARNING, code="ARCHITECTURE")
    if reason := oversized(config):  # the config announces more tensors than any model has
        yield Fault(reason, "a plausible number of tensors", file=CONFIG)
        return
    experts = _lost_experts(source)
    if experts:
        text = f"{len(experts)} tensors of experts are missing"
        yield Fault(text, "the same tensors for every expert, in every layer", tensors=experts)
    explained = {model_name(key) for key in (*source.explained, *experts)}
    if isinstance(shapes, Mapping):
        lost = [key for key in shapes if key not in tensors and key not in explained]
        text, expected = f"of {len(shapes)} missing", f"the tensors of {first_architecture(config)}"
    else:
        lost = [] if "ARCHITECTURE_KEYS" in source.codes else _lost_of_base(source)
        lost = [key for key in lost if key not in explained]
        text, expected = "missing", "every tensor of the base"
    if lost:
        yield Fault(f"{len(lost)} {text}", expected, tensors=lost)


def _lost_experts(source: Source) -> list[str]:
    """Return missing tensors of experts, and routers of layers without experts."""
    layers, lost = source.once(_experts), list[str]()
    count = _expert_count(source.config())
    for at, experts in layers.items():
        usual = set().union(*experts.values())
        for number in range(min(count or max(experts) + 1, _MOST)):
            parts = sorted(usual - experts.get(number, set()))
            lost += [f"{at}.{number}.{part}" for part in parts]
        if len(lost) > _MOST:
            break
    blocks = {at.removesuffix(".experts") for at in layers}
    ends = tuple({f".{block.rpartition('.')[2]}.gate.weight" for block in blocks})[:_MOST]
    routers = (key for key in source.once(plain_tensors) if key.endswith(ends))
    return lost + [key for key in routers if key.removesuffix(".gate.weight") not in blocks]


@check(
    "SHAPE_MISMATCH", ERROR, needs=(MODEL, WHOLE),
    why="`size mismatch for ...` in transformers, an assertion in vLLM's weight loader",
    fix="take the config.json that was saved with the weights",
    issues="OpenRLHF #682, OpenRLHF #87, LLaMA-Factory #3125, LLaMA-Factory #10186",
)  # fmt: skip
def shape_mismatch(source: Source) -> Iterator[Fault]:
    """Shapes or numbers of experts that disagree with config.json: a finding for each size."""
    shapes, tensors = source.once(_shapes), source.once(plain_tensors)
    wrong: dict[tuple[str, str], list[str]] = defaultdict(list)
    for key, shape in shapes.items() if isinstance(shapes, Mapping) else ():
        tensor = tensors.get(key)
        if tensor is None or not tensor.numel or tensor.shape == shape:
            continue
        wrong[str(list(tensor.shape)), str(list(shape))].append(key)
    count = _expert_count(source.config())
    for at, experts in source.once(_experts).items():
        if 0 < count <= max(experts):
            wrong[f"{max(experts) + 1} experts", f"{count}"].append(at)
    for (actual, expected), keys in wrong.items():
        yield Fault(actual, f"{expected}, as config.json says", tensors=keys)


def _lost_of_base(source: Source) -> list[str]:
    """Return missing tensors of the base, except heads that are tied or replaced."""
    base = source.base
    if base is None or not base.is_model or not base.weights.is_whole or stored(base.config()):
        return []
    if other_sizes(source):
        return []  # not the base
    there = {tail_of(key) for key in source.once(plain_tensors)}
    replaced = embeddings_of(base.tensors, base.config()).output
    return [
        key
        for key in base.tensors
        if tail_of(key) not in there and key != replaced and ".experts." not in key
    ]


_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "head_dim", "num_local_experts", "num_experts", "n_routed_experts",
)  # fmt: skip
"""Settings that training does not change. The vocabulary may grow."""


def other_sizes(source: Source) -> list[str]:
    """Return the sizes that differ from the base's, as text."""
    ours = source.config()
    theirs = source.base.config() if source.base is not None else {}
    pairs = {name: (of_text(ours, name), of_text(theirs, name)) for name in _SIZES}
    kinds = text_config(ours).get("model_type"), text_config(theirs).get("model_type")
    return [
        f"{name} {mine!r}, the base has {other!r}"
        for name, (mine, other) in {"model_type": kinds, **pairs}.items()
        if mine is not None and other is not None and mine != other
    ]
