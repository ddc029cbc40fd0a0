"""Names and shapes of tensors, against the model's class, config.json and the base.

For decoders of common families `tasks.weights.model` derives every tensor from config.json
in milliseconds. Other classes are built by transformers in a child process, with values=true only.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.audit.check import ERROR, MODEL, WARNING, WHOLE, Fault, check
from tasks.audit.class_contract import can_be_built, perform_apart
from tasks.audit.folder import StoredTensor
from tasks.audit.known import (
    first_architecture,
    is_multimodal,
    is_plain_text,
    known,
    of_text,
    text_config,
    whole,
)
from tasks.audit.repair import adapter_name, model_name, strip_prefixes
from tasks.audit.source import CONFIG, Kind, Source
from tasks.core.errors import ArtifactError
from tasks.weights.files.names import PEFT_PREFIX, unwrap
from tasks.weights.heads import BUFFERS, OPENRLHF, module_names
from tasks.weights.heads import WRAPPER as TRL_WRAPPER
from tasks.weights.model import model_facts, plain_model
from tasks.weights.model_class import oversized
from tasks.weights.quantized.config_fields import QUANTIZATION, stored

_PEFT = re.compile(
    r"(^|\.)(base_layer|lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|modules_to_save|"
    r"original_module|token_adapter)(\.|$)"
)
_LEFT_BY_PEFT = re.compile(r"\.(lora_\w+|original_module|token_adapter)(\.|$)")
_OWN = "the model's own names"


def plain_tensors(source: Source) -> Mapping[str, StoredTensor]:
    """Return the tensors of a model under the names that they have without wrappers."""
    if not source.is_model:
        return source.tensors
    names: dict[str, StoredTensor] = {}
    for key, tensor in source.tensors.items():
        if not _LEFT_BY_PEFT.search(key):
            names.setdefault(model_name(key), tensor)
    return names


@check(
    "WRAPPER_RESIDUE", ERROR,
    why="loaders find no key that they know: transformers initialises the model at random with a "
    "warning, vLLM stops; peft finds none of an adapter's tensors and only warns",
    fix="take the prefix off: {repair}",
    issues="OpenRLHF #991, Soup #335, axolotl #2744",
)  # fmt: skip
def wrapper_residue(source: Source) -> Iterator[Fault]:
    """Key prefixes of DeepSpeed, torch.compile, FSDP, or TRL's model with a value head."""
    if source.is_model:
        keys, trl = list(source.tensors), TRL_WRAPPER
    elif source.is_adapter:
        keys, trl = [key for key in source.tensors if "v_head." not in key], "\0"
    else:
        return
    wrapped = [key for key in keys if unwrap(key) != key or key.startswith(trl)]
    if wrapped:
        text = f"{len(wrapped)} keys with a wrapper's name"
        yield Fault(text, _OWN, tensors=wrapped, repair=strip_prefixes)


@check(
    "PEFT_RESIDUE", ERROR,
    why="transformers initialises every layer at random with a warning; `There is no module or "
    "parameter named 'base_model'` in vLLM; peft finds none of an adapter's tensors and only "
    "warns, so it has no effect",
    fix="take them off: {repair}; if lora_A and lora_B are among the keys of a model, the adapter "
    "was never merged: save it as an adapter, and deliver that",
    issues="OpenRLHF #991, OpenRLHF #920, OpenRLHF #1081",
)  # fmt: skip
def peft_residue(source: Source) -> Iterator[Fault]:
    """Names of PEFT's wrapper in a model, or keys of an adapter that are not as PEFT saves them."""
    if source.is_model:
        peft = [key for key in source.tensors if PEFT_PREFIX in key or _PEFT.search(key)]
        if peft:
            text = f"{len(peft)} keys of a PEFT model"
            yield Fault(text, _OWN, tensors=peft, repair=strip_prefixes)
    elif source.is_adapter:
        keys = [key for key in source.tensors if "v_head." not in key]
        wrong = [key for key in keys if adapter_name(key) != unwrap(key)]
        if wrong:
            text = f"{len(wrong)} of {len(keys)} keys with the adapter's name, or without a prefix"
            yield Fault(text, adapter_name(wrong[0]), tensors=wrong, repair=strip_prefixes)


@check(
    "ARCHITECTURE_ABSENT", ERROR, needs=(MODEL,),
    why="vLLM refuses: 'No model architectures are specified'; transformers needs an explicit "
    "class",
    fix='write "architectures": ["...ForCausalLM"] into config.json',
)  # fmt: skip
def architecture_absent(source: Source) -> Iterator[Fault]:
    """config.json names no class."""
    config = source.config()
    if config and not first_architecture(config):
        yield Fault(repr(config.get("architectures")), "the model's class", file=CONFIG)


@check(
    "ARCHITECTURE_MODEL_TYPE", ERROR, needs=(MODEL,),
    why="transformers uses model_type, vLLM the class: they load different models",
    fix="copy both from the base's config.json",
    issues="unsloth #1770, vLLM #15031",
)  # fmt: skip
def architecture_model_type(source: Source) -> Iterator[Fault]:
    """The class and model_type belong to different families."""
    name, kind = first_architecture(source.config()), source.config().get("model_type")
    of_class = known().kinds_of(name)
    if of_class and isinstance(kind, str) and kind in known().kinds and kind not in of_class:
        expected = f"model_type {' or '.join(sorted(of_class))}"
        yield Fault(f"{name} with model_type {kind!r}", expected, file=CONFIG)


_TOWER = re.compile(
    r"(^|\.)(visual|vision_tower|vision_model|vision_encoder|image_tower|video_tower|audio_tower|"
    r"multi_modal_projector)\."
)
_WRAPPED = re.compile(r"^(model\.)?language_model\.")
_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForSequenceClassification")
_TEXT_HEADS = ("ForCausalLM", "LMHeadModel")
_TEXT_KEYS = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
_BARE = ("layers.", "embed_tokens.", "norm.")
_DOUBLED = "model.model."


@check(
    "ARCHITECTURE_KEYS", ERROR, needs=(MODEL, WHOLE),
    why="vLLM and SGLang fail with KeyError or 'There is no module or parameter named ...'; "
    "transformers corrects some prefixes, and initialises the tensors that it does not find at "
    "random, with a warning",
    fix="rename the keys to those of the base's checkpoint, or set the class that they belong to",
    issues="unsloth #1770, vLLM #15031, LLaMA-Factory #8241",
)  # fmt: skip
def architecture_keys(source: Source) -> Iterator[Fault]:
    """Keys that do not belong to the class."""
    config, keys = source.config(), source.once(plain_tensors)
    name = first_architecture(config)
    if source.kind is Kind.VALUE or not keys or name not in known().classes:
        return  # remote code may use any keys
    towers = [key for key in keys if _TOWER.search(key)]
    wrapped = [key for key in keys if _WRAPPED.match(key)]
    if name.endswith(_TEXT_HEADS) and is_plain_text(config) and (towers or wrapped):
        text = "keys of a multimodal model"
        yield Fault(text, f"those of {name}", tensors=towers or wrapped)
    elif is_multimodal(config) and name.endswith("ForConditionalGeneration"):
        if all(key.startswith(_TEXT_KEYS) for key in keys):
            expected = f"those of {name}: a language model within it, and its tower"
            yield Fault("keys of a language model alone", expected, tensors=list(keys))
        short = [key for key in wrapped if key.removeprefix("language_model.").startswith(_BARE)]
        if short:
            expected = f"those of {name}: language_model.model. or model.language_model."
            yield Fault("language_model. without model.", expected, tensors=short)
        if len({key.partition("language_model.")[0] for key in wrapped}) > 1:
            yield Fault("two layouts of one model", "one", tensors=wrapped)
    doubled = [key for key in keys if key.startswith(_DOUBLED)]
    if doubled:
        yield Fault("a prefix twice", "model. once", tensors=doubled)
    bare = [key for key in keys if key.startswith(_BARE)]
    # Some multimodal families store the language model's keys without a prefix.
    plain = name.endswith(_HEADS) and not is_multimodal(config)
    if plain and bare and not any(key.startswith("model.") for key in keys):
        yield Fault("keys of a bare backbone", "the same behind model.", tensors=bare)


_ONE_EACH = re.compile(r"(?P<at>.+\.experts)\.(?P<number>\d{1,6})\.(?P<part>.+)")
_FUSED = re.compile(r"(?P<at>.+\.experts)\.(?P<part>(gate_up_proj|down_proj|gate_proj|up_proj).*)")
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_STORED_EACH = frozenset(
    {
        "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "deepseek_v2", "deepseek_v3",
        "glm4_moe", "ernie4_5_moe", "minimax", "minimax_m2", "phimoe", "jamba", "flex_olmo",
    }
)  # fmt: skip
"""Families whose published checkpoints have one tensor per expert."""
_IDENTITY = "zero_expert_num"
"""Setting of families with identity experts, which lack some or all tensors."""
_MOST = 10_000
"""Most experts of a layer, and most missing tensors, to examine: the files may be malicious."""


@dataclass
class _Layer:
    """Experts of one layer: the tensors of each by its number, and those of all experts at once."""

    parts: dict[int, set[str]] = field(default_factory=dict)
    fused: dict[str, StoredTensor] = field(default_factory=dict)


def _expert_layers(source: Source) -> dict[str, _Layer]:
    """Return the experts of each layer, by the name of their module."""
    layers: dict[str, _Layer] = {}
    if of_text(source.config(), _IDENTITY):
        return layers
    for key, tensor in source.once(plain_tensors).items():
        each, fused = _ONE_EACH.fullmatch(key), _FUSED.fullmatch(key)
        if each:
            layer = layers.setdefault(each["at"], _Layer())
            layer.parts.setdefault(int(each["number"]), set()).add(each["part"])
        elif fused and len(tensor.shape) == 3:
            layers.setdefault(fused["at"], _Layer()).fused[key] = tensor
    return layers


def _expert_count(config: Mapping[str, Any]) -> int | None:
    """Return the number of routed experts per layer in config.json."""
    counts = (whole(of_text(config, name)) for name in _EXPERT_COUNTS)
    return next((count for count in counts if count), None)


@check(
    "EXPERTS_WRONG", ERROR, needs=(MODEL, WHOLE),
    why="transformers 5 refuses with a size mismatch of the fused experts; vLLM and older loaders "
    "skip or re-initialise experts, or read past the end, and the model generates noise",
    fix="save the model again, or take the missing experts from the base if they were not trained; "
    "set the number of experts in config.json to that of the weights",
)  # fmt: skip
def experts_wrong(source: Source) -> Iterator[Fault]:
    """Missing experts, or another number of them than config.json says."""
    layers, count = source.once(_expert_layers), _expert_count(source.config())
    lacking: list[str] = []
    numbers: dict[str, int] = {}
    for at, layer in layers.items():
        most = max(layer.parts, default=-1) + 1
        sizes = {tensor.shape[0] for tensor in layer.fused.values()} - {0}
        if count is not None and (most > count or not sizes <= {count}):
            numbers[at] = max(most, *sizes, 0)
        usual = set().union(*layer.parts.values())
        for number in range(min(count or most, _MOST) if most else 0):
            parts = sorted(usual - layer.parts.get(number, set()))
            lacking += [f"{at}.{number}.{part}" for part in parts]
        if len(lacking) > _MOST:
            break
    if lacking:
        text = f"{len(lacking)} tensors of experts are missing"
        yield Fault(text, "the same tensors for every expert", tensors=lacking)
    blocks = {at.removesuffix(".experts") for at in layers}
    ends = tuple({f".{block.rpartition('.')[2]}.gate.weight" for block in blocks})[:_MOST]
    bare = [
        key
        for key in source.once(plain_tensors)
        if key.endswith(ends) and key.removesuffix(".gate.weight") not in blocks
    ]
    if bare:
        yield Fault("routers of layers without experts", "experts beside a router", tensors=bare)
    if numbers:
        text = f"{next(iter(numbers.values()))} experts"
        yield Fault(text, f"{count}, as config.json says", tensors=list(numbers))


@check(
    "EXPERTS_FUSED", WARNING, needs=(MODEL, WHOLE),
    why="transformers 5 packs experts in memory; if they are saved like this, older vLLM, SGLang "
    "and quantisers do not find them, or read only the layers that they know",
    fix="write one tensor per expert, as the base does: save_pretrained of transformers 5 does so",
    issues="vLLM PR #36997, vLLM PR #31849, MoE-Infinity PR #108",
)  # fmt: skip
def experts_fused(source: Source) -> Iterator[Fault]:
    """Experts fused in one tensor although the family stores one tensor per expert."""
    layers = source.once(_expert_layers).values()
    fused = [key for layer in layers for key in layer.fused]
    mixed = fused and any(layer.parts for layer in layers)
    if mixed or (fused and text_config(source.config()).get("model_type") in _STORED_EACH):
        text = f"{len(fused)} tensors of all experts{', the others one each' * bool(mixed)}"
        severity = ERROR if mixed else None
        yield Fault(text, "one tensor for each expert", tensors=fused, severity=severity)


_LM_HEAD = "lm_head.weight"
_VOCABULARY = ("model.embed_tokens.weight", _LM_HEAD)
_LEFT_BY_OLD = ("rotary_emb.inv_freq",)
"""Buffers that transformers 4 saved; every loader skips them."""
_BY_TYPE = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "granite": "GraniteForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM", "olmo2": "Olmo2ForCausalLM", "phi3": "Phi3ForCausalLM",
}  # fmt: skip


@dataclass(frozen=True)
class _Class:
    """Tensors of a model's class.

    Attributes:
        shapes: shape of every tensor, by key on disk.
        optional: keys that may be absent.
        problem: why the class is unknown; "" if it is known.
    """

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    optional: Collection[str] = ()
    problem: str = ""


def _class_of(source: Source) -> _Class | None:
    """Return the tensors of the class; None if they are not known, or cannot be compared."""
    config = source.config()
    if is_declared_elsewhere(source) or "ARCHITECTURE_KEYS" in source.codes or oversized(config):
        return None  # packed weights have other names and shapes
    facts = plain_model(_causal(config), "bfloat16", None)
    if facts is None:
        if not (source.values and can_be_built(source)):
            return None
        disk = {key: tuple(tensor.shape) for key, tensor in source.tensors.items()}
        try:
            of_class = perform_apart(model_facts, source.folder.root, "bfloat16", disk)
        except ArtifactError as error:
            return _Class(problem=error.message)
        built = {tensor.name: tensor.shape for tensor in of_class.tensors}
        return _Class(built, {*of_class.tied, *of_class.unread})
    shapes = {tensor.name: tensor.shape for tensor in facts.tensors}
    optional = set(facts.tied)
    if source.kind is Kind.REWARD:
        optional |= {_LM_HEAD, *BUFFERS}
        shapes.pop(_LM_HEAD, None)
    heads = {*module_names(config), "v_head"} if source.kind is not Kind.MODEL else set()
    keys = source.once(plain_tensors)
    optional |= {key for key in keys if key.partition(".")[0] in heads}
    return _Class(shapes, optional)


def _causal(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration with a language model's head; its other tensors are the same."""
    name = first_architecture(config).replace("ForSequenceClassification", "ForCausalLM")
    if name in OPENRLHF:
        name = _BY_TYPE.get(str(config.get("model_type")), "")
    return {**config, "architectures": [name]} if name else {}


def is_declared_elsewhere(source: Source) -> bool:
    """Return True if another file or key that vLLM reads says that the weights are packed."""
    config = source.config()
    beside = (text_config(config).get(QUANTIZATION), config.get("compression_config"))
    is_set = any(isinstance(settings, Mapping) and settings for settings in beside)
    return _MODELOPT in source.folder.files or (is_set and not config.get(QUANTIZATION))


_MODELOPT = "hf_quant_config.json"
"""Written by NVIDIA's exporter; config.json then says nothing about quantisation."""


@check(
    "TENSOR_MISSING", ERROR, needs=(MODEL, WHOLE),
    why="transformers initialises them at random with a warning; vLLM stops with `Following "
    "weights were not initialized from checkpoint`, or leaves them empty",
    fix="take them from the base if training did not change them; else save again",
    issues="OpenRLHF #1232, OpenRLHF #180, OpenRLHF #209",
)  # fmt: skip
def tensor_missing(source: Source) -> Iterator[Fault]:
    """Tensors of the class, of the layers in config.json, or of the base, that are missing."""
    config, tensors = source.config(), source.once(plain_tensors)
    if reason := oversized(config):  # the config announces more tensors than any model has
        yield Fault(reason, "a plausible number of tensors", file=CONFIG)
        return
    explained = {model_name(key) for key in source.explained}
    of_class = source.once(_class_of)
    lost: list[str] = []
    if of_class is not None and not of_class.problem:
        shapes = of_class.shapes
        lost = [key for key in shapes if key not in tensors and key not in explained]
        none = ": no key is as expected" if len(lost) == len(shapes) else ""
        if lost:
            text = f"{len(lost)} of {len(shapes)} missing{none}"
            yield Fault(text, f"the tensors of {first_architecture(config)}", tensors=lost)
    elif "ARCHITECTURE_KEYS" not in source.codes:
        lost = [key for key in _lost_of_base(source) if key not in explained]
        if lost and source.base is not None:
            text = f"{len(lost)} of {len(source.base.tensors)} tensors are missing"
            yield Fault(text, "every tensor of the base", tensors=lost)
        layers = source.once(_layers)
        there = {int(match["number"]) for key in lost if (match := _LAYER.match(key))}
        lacking = [number for number in layers.lacking if number not in there]
        if lacking:
            expected = f"{layers.count}, as config.json says"
            yield Fault(layers.text, expected, tensors=[f"layer {number}" for number in lacking])
        if source.once(_untied_without_head):
            yield Fault(
                "tie_word_embeddings is false, and no lm_head.weight",
                "lm_head.weight, or tie_word_embeddings true",
                file=CONFIG,
                fix="set tie_word_embeddings to true if the model was tied, else save it again",
            )
    layers = source.once(_layers)
    if layers.lacks_mtp:
        yield Fault(
            f"{layers.promised} layers of multi-token prediction in config.json, none in the files",
            "their tensors, or 0", file=CONFIG, severity=WARNING,
            why="vLLM's speculative decoding fails; save_pretrained drops tensors that the class "
            "does not use",
            fix="copy these tensors from the base, or set their number in config.json to 0",
        )  # fmt: skip


@check(
    "TENSOR_UNEXPECTED", WARNING, needs=(MODEL, WHOLE),
    why="transformers ignores them, vLLM stops: `There is no module or parameter named ...`",
    fix="remove them, or set the class in config.json that they belong to",
    issues="unsloth #1770",
)  # fmt: skip
def tensor_unexpected(source: Source) -> Iterator[Fault]:
    """Tensors that the model's class, or the number of layers in config.json, does not have."""
    of_class, layers = source.once(_class_of), source.once(_layers)
    if of_class is not None and not of_class.problem:
        explained = {model_name(key) for key in source.explained}
        odd = [
            key
            for key in source.once(plain_tensors)
            if not (key in of_class.shapes or key in of_class.optional or key in explained)
            and not key.endswith(_LEFT_BY_OLD)
        ]
        if odd:
            severity = ERROR if source.codes.get("TENSOR_MISSING") is ERROR else None
            text = f"{len(odd)} that the class does not have"
            expected = f"the tensors of {first_architecture(source.config())}"
            yield Fault(text, expected, tensors=odd, severity=severity)
    elif layers.surplus and "ARCHITECTURE_KEYS" not in source.codes:
        numbers = [f"layer {number}" for number in layers.surplus]
        expected = f"{layers.count}, as config.json says"
        yield Fault(layers.text, expected, tensors=numbers, severity=ERROR)


@check(
    "SHAPE_MISMATCH", ERROR, needs=(MODEL, WHOLE),
    why="`size mismatch for ...` in transformers, an assertion in vLLM's weight loader",
    fix="take the config.json that was saved with the weights",
    issues="OpenRLHF #682, LLaMA-Factory #3125",
)  # fmt: skip
def shape_mismatch(source: Source) -> Iterator[Fault]:
    """Tensors whose shape disagrees with config.json: one finding for each wrong size."""
    of_class, tensors = source.once(_class_of), source.once(plain_tensors)
    wrong: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for key, shape in (of_class.shapes if of_class is not None else {}).items():
        tensor = tensors.get(key)
        if tensor is None or not tensor.numel or tensor.shape == shape:
            continue
        if key in _VOCABULARY and tensor.shape[1:] == shape[1:]:
            continue  # the number of rows has its own findings
        wrong.setdefault((tensor.shape, shape), []).append(key)
    for (actual, expected), keys in wrong.items():
        yield Fault(str(list(actual)), str(list(expected)), tensors=keys)


@check(
    "CONTRACT_UNKNOWN", WARNING, needs=(MODEL, WHOLE),
    why="`AutoModel.from_pretrained` fails the same way; vLLM may have a class of its own",
    fix="install the transformers version that saved the model, or correct config.json",
)  # fmt: skip
def contract_unknown(source: Source) -> Iterator[Fault]:
    """transformers cannot build a model from config.json, so names and shapes were not checked."""
    of_class = source.once(_class_of)
    if of_class is not None and of_class.problem:
        expected = f"a class of {first_architecture(source.config())}"
        yield Fault(of_class.problem, expected, file=CONFIG)


_LAYER = re.compile(r"^(?P<at>(?:.*\.)?(?:layers|h|blocks))\.(?P<number>\d{1,6})\.")
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers")
_MTP = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


@dataclass(frozen=True)
class _Layers:
    """Layers of the files against config.json; `promised` counts multi-token prediction layers."""

    count: int = 0
    text: str = ""
    lacking: Collection[int] = ()
    surplus: Collection[int] = ()
    promised: int = 0
    lacks_mtp: bool = False


def _layers(source: Source) -> _Layers:
    config, text = source.config(), text_config(source.config())
    keys = source.once(plain_tensors)
    counts = [count for name in _COUNTS if (count := whole(of_text(config, name)))]
    lists = _layer_lists(keys)
    odd = config.get("is_encoder_decoder") or first_architecture(config) not in known().classes
    if not lists or not counts or odd or source.kind is Kind.VALUE:
        return _Layers()
    promised = next((n for name in _MTP if (n := whole(text.get(name))) and n > 0), 0)
    # Some families count halves or stacks of layers, under these or other names.
    counted = {value for name, value in text.items() if "layer" in name and whole(value)}
    full = (
        layers
        for layers in lists.values()
        if len(layers) in counted and max(layers) == len(layers) - 1
    )
    numbers = next(full, lists[min(lists, key=lambda at: (at.count("."), at))])
    count = len(numbers) if len(numbers) in counted and max(numbers) < len(numbers) else counts[0]
    has_mtp = any(key.startswith(("mtp.", "model.mtp.")) or ".mtp." in key for key in keys)
    return _Layers(
        count,
        f"{len(numbers)} layers, up to {max(numbers)}",
        [number for number in range(min(count, max(numbers) + 1000)) if number not in numbers],
        sorted(number for number in numbers if number >= count + promised),
        promised,
        bool(promised) and not has_mtp and not any(number >= count for number in numbers),
    )


def _layer_lists(keys: Iterable[str]) -> dict[str, set[int]]:
    """Return layer numbers by the name of their list, without those of towers."""
    lists: dict[str, set[int]] = {}
    for key in keys:
        match = _LAYER.match(key)
        if match and not _TOWER.search(key) and "mtp" not in match["at"]:
            lists.setdefault(match["at"], set()).add(int(match["number"]))
    return lists


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


_TAIL = re.compile(r"(?:.*?\.)?([^.]+\.\d+\..+)")


def tail_of(name: str) -> str:
    """Return the end of a name from its layer list on, which wrapping the model does not change."""
    match = _TAIL.fullmatch(name)
    return match[1] if match else name.rpartition(".")[2]


_INPUT = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "embeddings")
_OUTPUT = ("lm_head", "embed_out")
_ELSEWHERE = re.compile(
    r"\.\d+\.|position|(^|\.)(visual|vision_\w+|audio_\w+|image_\w+|qformer|mtp)\."
)
"""Keys of layers (multi-token prediction has its own embeddings) and of towers."""
TIED_BY_DEFAULT = frozenset(
    {"gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "cohere", "cohere2", "opt", "bloom"}
)
"""Families that omit `tie_word_embeddings` if it is true. In other families an absent setting means
nothing."""
_GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@dataclass(frozen=True)
class Embeddings:
    """Keys of a model's embeddings, "" if there is none; and if config.json ties them, or None."""

    input: str
    output: str
    tied: bool | None


def embeddings_of(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> Embeddings:
    """Find the embeddings among a model's keys."""
    return Embeddings(_find(tensors, _INPUT), _find(tensors, _OUTPUT), _is_tied(config))


def _is_tied(config: Mapping[str, Any]) -> bool | None:
    """Return `tie_word_embeddings`, from the top level or the language model's settings."""
    read = [settings.get("tie_word_embeddings") for settings in (config, text_config(config))]
    values = {value for value in read if isinstance(value, bool)}
    if values:  # loaders read different ones if they disagree
        return values.pop() if len(values) == 1 else None
    return True if text_config(config).get("model_type") in TIED_BY_DEFAULT else None


def _find(tensors: Mapping[str, StoredTensor], leaves: Iterable[str]) -> str:
    """Return the matrix with that name nearest to the top level; "" if several are equally near."""
    wanted = tuple(f"{leaf}.weight" for leaf in leaves)
    keys = [
        key
        for key, tensor in tensors.items()
        if key.endswith(wanted)
        and key.rpartition(".")[0].rpartition(".")[2] in leaves
        and len(tensor.shape) == 2
        and not _ELSEWHERE.search(key)
    ]
    depth = min((key.count(".") for key in keys), default=0)
    nearest = [key for key in keys if key.count(".") == depth]
    return nearest[0] if len(nearest) == 1 else ""


def _untied_without_head(source: Source) -> bool:
    """Return True for a language model that is not tied and has no output embedding."""
    config, tensors = source.config(), source.once(plain_tensors)
    embeddings = embeddings_of(tensors, config)
    generates = first_architecture(config).endswith(_GENERATES)
    if source.kind is not Kind.MODEL or not generates or config.get("is_encoder_decoder"):
        return False
    if not embeddings.input or embeddings.output or embeddings.tied is not False:
        return False
    rows = tensors[embeddings.input].shape[:1]
    others = [  # matrices outside layers with a row for every token, e.g. `head.weight`
        key
        for key, tensor in tensors.items()
        if key != embeddings.input and len(tensor.shape) == 2 and tensor.shape[:1] == rows
        and not any(part.isdecimal() for part in key.split("."))
    ]  # fmt: skip
    return not others and rows != (0,)
