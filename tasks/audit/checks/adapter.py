"""PEFT adapters: their settings and tensors, and what servers leave out.

`merge` plans the merge into the base, by which names and shapes are compared with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from tasks.audit.check import ADAPTER, BASE, ERROR, WARNING, Fault, check, some
from tasks.audit.known import INPUT, OUTPUT, TOWER, adapter_name, is_multimodal, text_config, texts
from tasks.audit.source import ADAPTER_CONFIG, Kind, Source
from tasks.weights.files.names import PEFT_PREFIX
from tasks.weights.files.tensors import Tensor
from tasks.weights.heads import SIDE_FILES
from tasks.weights.lora_config import PATTERN, AdapterConfig, parse_config
from tasks.weights.quantized.config_fields import is_packed, refusal, remedy, stored

_PART = re.compile(r"(?P<module>.+)\.lora_(embedding_)?(?P<part>A|B|magnitude_vector)(\.weight)?")
_MAGNITUDE = "magnitude_vector"
_BASE_LAYER = ".base_layer"
_LAYER = re.compile(r"\.(\d{1,8})(?=\.)")
_MOST_PATTERNS = 400
"""Python caches about 500 compiled patterns."""


@dataclass
class AdapterKeys:
    """The tensors of an adapter."""

    # LoRA tensors by module of the base, then by part: A, B, magnitude_vector
    pairs: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    # key in the file of tensors that are stored in full, by their key in the base
    whole: dict[str, str] = field(default_factory=dict)


def adapter_keys(source: Source) -> AdapterKeys:
    """Sort an adapter's tensors by their keys, less prefixes of wrappers."""
    result = AdapterKeys()
    for key, tensor in source.tensors.items():
        name = adapter_name(key).removeprefix(PEFT_PREFIX)
        if part := _PART.fullmatch(name):
            result.pairs.setdefault(part["module"], {})[part["part"]] = tensor
        elif ".lora_" not in name and ".trainable_tokens_delta" not in name:
            result.whole[name.replace(".modules_to_save.", ".")] = key
    return result


def plain_module(module: str) -> str:
    """Return a module's name in the base, without the `base_layer`s of targeted parameters."""
    while module.endswith(_BASE_LAYER):
        module = module.removesuffix(_BASE_LAYER)
    return module


def _is_cheap(*patterns: str) -> bool:
    """Return True if no pattern can take long to match; untrusted regular expressions can."""
    return not any(re.search(r"[*+{(]", pattern) for pattern in patterns)


def pattern_of(name: str) -> str:
    """Return a name with `*` for layer numbers: `model.layers.*.self_attn.q_proj`."""
    return _LAYER.sub(".*", name)


def is_lora(source: Source) -> bool:
    """Return True for a LoRA adapter."""
    return source.is_adapter and source.config(ADAPTER_CONFIG).get("peft_type") == "LORA"


def has_pairs(source: Source) -> bool:
    """Return True for a LoRA adapter whose tensors are all known."""
    return is_lora(source) and source.weights.is_whole and bool(source.tensors)


def has_settings(source: Source) -> bool:
    """Return True where settings of LoRA are used: an adapter, or shards, for gathering."""
    return source.is_adapter or (
        source.kind is Kind.SHARDS and ADAPTER_CONFIG in source.folder.files
    )


def adapter_config(source: Source) -> AdapterConfig:
    """Return the settings of a LoRA adapter."""
    config, _ = parse_config(source.config(ADAPTER_CONFIG))
    if any(name in source.folder.files for name in SIDE_FILES):  # LLaMA-Factory's value head
        saved = tuple(name for name in config.modules_to_save if name != "v_head")
        config = replace(config, modules_to_save=saved)
    return config


@check(
    "ADAPTER_CONFIG", ERROR, needs=(has_settings,),
    why="loaders refuse the adapter, or it has no effect, or another scale than in training",
    fix="restore the file of the run that trained it; merge what is not LoRA with peft",
    issues="verl PR #1821, verl PR #5326, verl #7285",
)  # fmt: skip
def wrong_settings(source: Source) -> Iterator[Fault]:
    """Settings in adapter_config.json that are invalid, or that cannot be merged."""
    raw = source.config(ADAPTER_CONFIG)
    targets = ("target_modules", "target_parameters", "trainable_token_indices")
    if raw.get("peft_type") == "LORA" and not any(raw.get(name) for name in targets):
        yield Fault("no target_modules", "names, or a pattern", file=ADAPTER_CONFIG)
    for problem in parse_config(raw)[1] if raw else ():
        if not problem.startswith("target_modules is null"):
            severity = ERROR if problem.startswith(("r=", "lora_alpha=")) else WARNING
            expected = "a LoRA adapter that can be merged"
            yield Fault(problem, expected, file=ADAPTER_CONFIG, severity=severity)
    if not has_pairs(source) or raw.get("target_parameters"):
        return  # names of targeted parameters are not in the keys
    config = source.once(adapter_config)
    names = [plain_module(name) for name in source.once(adapter_keys).pairs]
    for key in ("rank_pattern", "alpha_pattern"):
        dead = [
            pattern
            for pattern in islice(getattr(config, key), _MOST_PATTERNS)
            if _is_cheap(pattern)
            and not any(re.match(PATTERN.replace("{}", pattern), name) for name in names)
        ]
        if dead and names:
            text = f"{key}: {some(dead)} matches no module"
            yield Fault(text, "names of its modules", file=ADAPTER_CONFIG, severity=WARNING)


@check(
    "ADAPTER_PAIRS", ERROR, needs=(has_pairs,),
    why="peft stops with 'size mismatch', or only warns and leaves modules untrained",
    fix="restore adapter_config.json of the run that trained it, or save the adapter again",
    issues="OpenRLHF #651",
)  # fmt: skip
def wrong_pairs(source: Source) -> Iterator[Fault]:
    """LoRA pairs that lack a half, or have other ranks or magnitudes than adapter_config.json."""
    config, wrong = source.once(adapter_config), dict[tuple[str, str], list[str]]()
    for module, pair in source.once(adapter_keys).pairs.items():
        for fault in _faults_of(module, pair, config):
            wrong.setdefault(fault, []).append(module)
    for (actual, expected), modules in wrong.items():
        yield Fault(f"{len(modules)}: {actual}", expected, tensors=modules)


def _faults_of(
    module: str, pair: dict[str, Tensor], config: AdapterConfig
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a pair, and what is right."""
    a, b = pair.get("A"), pair.get("B")
    if _MAGNITUDE in pair and not config.use_dora:
        yield "magnitudes, use_dora is not set", "use_dora true"
    if a is None or b is None:
        half, other = ("A", "B") if a else ("B", "A")
        yield f"lora_{half} without lora_{other}", "both for every module"
        return
    if config.use_dora and not config.target_parameters and _MAGNITUDE not in pair:
        yield "use_dora, no magnitudes", "a lora_magnitude_vector for every module"
    patterns = config.rank_pattern
    cheap = len(patterns) <= _MOST_PATTERNS and _is_cheap(*patterns)
    if len(a.shape) > 1 and len(b.shape) > 1 and cheap and 0 not in (*a.shape, *b.shape):
        ranks, rank = (a.shape[0], b.shape[1]), config.rank_of(plain_module(module))
        # A targeted parameter of experts has the pairs of all experts in one tensor.
        stacked = config.target_parameters and ranks[0] % rank == 0
        if ranks[0] != ranks[1] or (ranks[0] != rank and not stacked):
            yield f"rank {ranks[0]} by {ranks[1]}", f"rank {rank}, as {ADAPTER_CONFIG} says"


@check(
    "ADAPTER_COVERAGE", WARNING, needs=(has_pairs,),
    why="peft initialises absent tensors and only warns: the model is partly the base",
    fix="save the adapter again with all tensors gathered; see also {with_base}",
    issues="OpenRLHF #651, OpenRLHF #682, ms-swift #6481",
)  # fmt: skip
def uncovered_targets(source: Source) -> Iterator[Fault]:
    """Target modules, or layers, without a LoRA pair."""
    pairs, config = source.once(adapter_keys).pairs, source.once(adapter_config)
    if not isinstance(config.target_modules, str):
        names = [f".{plain_module(module)}" for module in pairs]
        ends = {name[at:] for name in names for at, char in enumerate(name) if char == "."}
        absent = [name for name in config.target_modules if f".{name}" not in ends]
        if absent:
            severity = ERROR if len(absent) == len(config.target_modules) else None
            text, expected = "no pair of that name", "one for each target"
            yield Fault(text, expected, ADAPTER_CONFIG, absent, severity=severity)
    if source.planned or config.layers_to_transform:
        return  # the plan of the merge compares every module
    layers: dict[str, set[int]] = {}
    for module in pairs:
        if number := _LAYER.search(module):
            layers.setdefault(pattern_of(module), set()).add(int(number[1]))
    total = max((max(numbers) for numbers in layers.values()), default=-1) + 1
    for pattern, there in layers.items():
        lacking = [number for number in range(min(there), total) if number not in there][:1000]
        if lacking and len(there) * 2 > total:  # else layers of two kinds alternate
            names = [f"{pattern}: layer {number}" for number in lacking]
            yield Fault(f"{len(there)} of {total} layers", "a pair in every layer", tensors=names)


_HEADS = ("classifier", "score")
"""peft adds both to modules_to_save for a classifier, which has one of them."""
_ALL_HEADS = ("v_head", *_HEADS)
"""`heads` covers them."""
_ROWS = ".trainable_tokens_delta"
"""Part of the keys of trained rows of an embedding."""
_EMBEDDINGS = (*INPUT, *OUTPUT)
"""Modules that `save_embedding_layers="auto"` stores in full when the vocabulary has grown."""


@check(
    "ADAPTER_SAVED", ERROR, needs=(has_pairs,),
    why="peft fails with KeyError, or drops tensors without a word",
    fix="restore modules_to_save and bias, or save the adapter again",
    issues="LLaMA-Factory #7665, peft #2450",
)  # fmt: skip
def saved_modules(source: Source) -> Iterator[Fault]:
    """Full tensors that disagree with adapter_config.json."""
    whole, config = source.once(adapter_keys).whole, source.once(adapter_config)
    wanted = set(config.modules_to_save)
    if config.task_type in ("SEQ_CLS", "TOKEN_CLS"):
        wanted -= set(_HEADS)
    if any(_is_of(_ALL_HEADS, key) for key in whole):
        wanted -= set(_ALL_HEADS)  # ms-swift names every possible head
    if config.trainable_token_indices and not any(_ROWS in key for key in source.tensors):
        yield Fault("trainable_token_indices, and no rows", "their rows", ADAPTER_CONFIG)
    absent = sorted(name for name in wanted if not any(_is_of([name], key) for key in whole))
    if absent:
        text = "no tensor of a name in modules_to_save"
        yield Fault(text, "the module in full", ADAPTER_CONFIG, absent)
    odd = [
        key
        for name, key in whole.items()
        if not _is_of((*config.modules_to_save, *_EMBEDDINGS, *_ALL_HEADS), name)
        and not (name.endswith(".bias") and config.bias != "none")
    ]
    if odd:
        text, expected = f"{len(odd)} full tensors", "named by modules_to_save or bias"
        yield Fault(text, expected, tensors=odd, severity=WARNING)


def _is_of(modules: Iterable[str], key: str) -> bool:
    """Return True if a key belongs to a saved module that one of the names, or its end, denotes."""
    at = key.rpartition(".")[0]
    return any(at.endswith(module) or f".{module}." in f".{at}." for module in modules)


_TEXT, _WRAPPED = "model.layers.", re.compile(r"(model\.)?language_model\..*\.\d+\.")
_TEXT_NAMES_TAKEN = ("ministral3", "mistral")
"""Text models whose names vLLM maps to the multimodal model (its `mistral3.py`)."""


@check(
    "VLLM_LORA", WARNING, needs=(is_lora,),
    why="vLLM, for some families SGLang too, leaves these parts of an adapter out without a word",
    fix="merge it before serving: {merge}; or ask the server whether it applies it: verify",
    issues="vLLM PR #41384, vLLM PR #52198, sglang PR #25528, vLLM #34186, vLLM #48019",
)  # fmt: skip
def ignored_by_vllm(source: Source) -> Iterator[Fault]:
    """Pairs that servers may leave out: on a tower, on parameters, under a text model's names."""
    parameters = texts(source.config(ADAPTER_CONFIG).get("target_parameters"))
    if parameters:
        expected = "target_modules, or a server that applies them"
        yield Fault(f"target_parameters {some(parameters)}", expected, file=ADAPTER_CONFIG)
    pairs = source.once(adapter_keys).pairs
    towers = [name for name in pairs if TOWER.search(name)]
    if towers:
        text, expected = f"{len(towers)} pairs on a tower", "pairs on the language model"
        yield Fault(text, expected, tensors=towers)
    base = source.base
    if base is None or not is_multimodal(base.config()):
        return
    wrapped = [key for key in base.tensors if _WRAPPED.match(key)]
    names = [name for name in pairs if name.startswith(_TEXT)]
    taken = text_config(base.config()).get("model_type") in _TEXT_NAMES_TAKEN
    if names and wrapped and not taken and not any(key.startswith(_TEXT) for key in base.tensors):
        expected = f"names of the multimodal model, as {wrapped[0].rpartition('.')[0]}"
        yield Fault(f"{names[0]}, a name of the text model", expected, tensors=names)


@check(
    "BASE_QUANTISED", WARNING, needs=(ADAPTER, BASE),
    why="4-bit weights differ from 16-bit ones by more than most adapters change them",
    fix="merge it with merge.base=dequantized, on the base that it was trained on",
    issues="ms-swift #7907, LLaMA-Factory #10328, unsloth-zoo PR #810, peft #2321, peft #2105",
)  # fmt: skip
def qlora_base(source: Source) -> Iterator[Fault]:
    """An adapter that was trained on a 4-bit base; an error for weights that cannot be decoded."""
    name = source.config(ADAPTER_CONFIG).get("base_model_name_or_path")
    config, root, text = source.known_base.config(), source.known_base.root, ""
    if refused := refusal(config):
        why = "the adapter can neither be merged into such weights nor compared with them"
        fix = "take the unquantised model that it was made from as base="
        yield Fault(f"{root}: {refused}", remedy(root), "", (), ERROR, why, fix)
    elif is_packed(config):
        text = f"a base of {stored(config)}"
    elif isinstance(name, str) and name.lower().rstrip("/").endswith(("-bnb-4bit", "-4bit")):
        text = f"trained on {name}, but base is in 16 bits"
    if text:
        yield Fault(text, "the dequantised base", ADAPTER_CONFIG)
