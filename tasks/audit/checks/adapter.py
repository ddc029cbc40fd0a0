"""PEFT adapters: their settings, their tensors, and what vLLM accepts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from tasks.audit.check import ADAPTER, ERROR, INFO, WARNING, Fault, check, some
from tasks.audit.folder import StoredTensor
from tasks.audit.known import DEFAULT_LORA_RANK, known, texts, whole
from tasks.audit.source import ADAPTER_CONFIG, Kind, Source
from tasks.audit.tensor_names import adapter_name
from tasks.weights.files.names import PEFT_PREFIX
from tasks.weights.heads import SIDE_FILES
from tasks.weights.lora_config import PATTERN, AdapterConfig, parse_config

_HALF = re.compile(r"(?P<module>.+)\.lora_(embedding_)?(?P<half>[AB])(\.weight)?")
_MAGNITUDE = re.compile(r"(?P<module>.+)\.lora_magnitude_vector(\.weight)?")
_TOKENS = re.compile(r"(?P<module>.+?)(\.token_adapter)?\.trainable_tokens_delta")
_BASE_LAYER = ".base_layer"
_LAYER = re.compile(r"\.(\d{1,8})(?=\.)")


@dataclass
class Pair:
    """LoRA tensors of one module."""

    a: StoredTensor | None = None
    b: StoredTensor | None = None
    magnitude: StoredTensor | None = None

    @property
    def file(self) -> str:
        """File of the first of its tensors."""
        return next((t.file for t in (self.a, self.b, self.magnitude) if t is not None), "")


@dataclass
class AdapterKeys:
    """The tensors of an adapter.

    Attributes:
        pairs: LoRA pairs by module name in the base.
        tokens: rows of trained tokens, by embedding.
        whole: tensors that are stored in full, by their key in the base.
        keys: key in the file, by name in `tokens` or `whole`.
    """

    pairs: dict[str, Pair] = field(default_factory=dict)
    tokens: dict[str, StoredTensor] = field(default_factory=dict)
    whole: dict[str, StoredTensor] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)


def adapter_keys(source: Source) -> AdapterKeys:
    """Sort an adapter's tensors by their keys, less prefixes of wrappers."""
    result = AdapterKeys()
    for key, tensor in source.tensors.items():
        name = adapter_name(key).removeprefix(PEFT_PREFIX)
        half, magnitude = _HALF.fullmatch(name), _MAGNITUDE.fullmatch(name)
        tokens = _TOKENS.fullmatch(name)
        if half:
            pair = result.pairs.setdefault(half["module"], Pair())
            setattr(pair, half["half"].lower(), tensor)
        elif magnitude:
            result.pairs.setdefault(magnitude["module"], Pair()).magnitude = tensor
        elif tokens:
            result.tokens[tokens["module"]] = tensor
            result.keys[tokens["module"]] = key
        elif ".lora_" not in name:
            plain = name.replace(".modules_to_save.", ".")
            result.whole[plain] = tensor
            result.keys[plain] = key
    return result


def plain_module(module: str) -> str:
    """Return a module's name in the base, without the `base_layer`s of targeted parameters."""
    while module.endswith(_BASE_LAYER):
        module = module.removesuffix(_BASE_LAYER)
    return module


def pattern_of(name: str) -> str:
    """Return a name with `*` for layer numbers: `model.layers.*.self_attn.q_proj`."""
    return _LAYER.sub(".*", name)


_MOST_PATTERNS = 400
"""Python caches about 500 compiled patterns."""


def is_cheap(*patterns: str) -> bool:
    """Return True if no pattern can take long to match; untrusted regular expressions can."""
    return not any(re.search(r"[*+{(]", pattern) for pattern in patterns)


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
    "ADAPTER_IS_NO_MODEL", INFO, needs=(ADAPTER,),
    why="engines that get it as a model fail: a missing config.json (vLLM), a traceback",
    fix="serve it beside its base, {serve}, or merge it, {merge}",
    issues="unsloth #1191, LLaMA-Factory #4896, LLaMA-Factory #7511",
)  # fmt: skip
def adapter_is_no_model(source: Source) -> Iterator[Fault]:
    """An adapter, which is not a model by itself."""
    name = source.config(ADAPTER_CONFIG).get("base_model_name_or_path")
    yield Fault("an adapter", f"to be served with its base, {name or 'which it does not name'}")


@check(
    "ADAPTER_CONFIG", ERROR, needs=(has_settings,),
    why="loaders refuse the adapter, or it has no effect, or another scale than in training",
    fix="restore the file of the run that trained it; merge what is not LoRA with peft",
    issues="verl PR #1821, verl PR #5326, verl #7285",
)  # fmt: skip
def wrong_settings(source: Source) -> Iterator[Fault]:
    """Settings in adapter_config.json that are invalid, or that cannot be merged."""
    raw = source.config(ADAPTER_CONFIG)
    _, problems = parse_config(raw)
    expected = "a LoRA adapter that can be merged"
    targets = ("target_modules", "target_parameters", "trainable_token_indices")
    if raw and raw.get("peft_type") == "LORA" and not any(raw.get(name) for name in targets):
        yield Fault("no target_modules", "names, or a pattern", file=ADAPTER_CONFIG)
    for problem in problems if raw else ():
        if problem.startswith("target_modules is null"):
            continue
        wrong = problem.startswith(("r=", "lora_alpha="))
        severity = None if wrong else WARNING
        yield Fault(problem, expected, file=ADAPTER_CONFIG, severity=severity)
    for setting, dead in _dead_patterns(source) if has_pairs(source) else ():
        text = f"{setting}: {some(dead)} matches no module"
        yield Fault(text, "names of its modules", file=ADAPTER_CONFIG, severity=WARNING)


def _dead_patterns(source: Source) -> Iterator[tuple[str, list[str]]]:
    """Yield the keys of rank_pattern and alpha_pattern that match none of the modules."""
    config = source.once(adapter_config)
    names = [plain_module(name) for name in source.once(adapter_keys).pairs]
    if config.target_parameters or not names:
        return  # names of targeted parameters are not in the keys
    for setting in ("rank_pattern", "alpha_pattern"):
        dead = [
            pattern
            for pattern in islice(getattr(config, setting), _MOST_PATTERNS)
            if is_cheap(pattern)
            and not any(re.match(PATTERN.replace("{}", pattern), name) for name in names)
        ]
        if dead:
            yield setting, dead


@check(
    "ADAPTER_PAIRS", ERROR, needs=(has_pairs,),
    why="peft stops with 'size mismatch', or only warns and leaves modules untrained",
    fix="restore adapter_config.json of the run that trained it, or save the adapter again",
    issues="OpenRLHF #651",
)  # fmt: skip
def wrong_pairs(source: Source) -> Iterator[Fault]:
    """LoRA pairs that lack a half, or have other ranks or magnitudes than adapter_config.json."""
    config, pairs = source.once(adapter_config), source.once(adapter_keys).pairs
    wrong: dict[tuple[str, str], list[str]] = {}
    cheap = len(config.rank_pattern) <= _MOST_PATTERNS and is_cheap(*config.rank_pattern)
    for module, pair in pairs.items():
        if pair.magnitude and not config.dora:
            wrong.setdefault(("magnitudes, use_dora is not set", "use_dora true"), []).append(
                module
            )
        if pair.a is None or pair.b is None:
            half, other = ("A", "B") if pair.a else ("B", "A")
            text = f"lora_{half} without lora_{other}", "both for every module"
            wrong.setdefault(text, []).append(module)
            continue
        if config.dora and not config.target_parameters and not pair.magnitude:
            text = "use_dora, no magnitudes", "a lora_magnitude_vector for every module"
            wrong.setdefault(text, []).append(module)
        if len(pair.a.shape) > 1 and len(pair.b.shape) > 1 and cheap:
            ranks, rank = (pair.a.shape[0], pair.b.shape[1]), config.rank_of(plain_module(module))
            # A targeted parameter of experts has the pairs of all experts in one tensor.
            stacked = config.target_parameters and ranks[0] % rank == 0
            empty = 0 in (*pair.a.shape, *pair.b.shape)  # EMPTY_TENSOR
            if not empty and (ranks[0] != ranks[1] or (ranks[0] != rank and not stacked)):
                text = f"rank {ranks[0]} by {ranks[1]}", f"rank {rank}, as {ADAPTER_CONFIG} says"
                wrong.setdefault(text, []).append(module)
    for (actual, expected), modules in wrong.items():
        yield Fault(f"{len(modules)}: {actual}", expected, pairs[modules[0]].file, modules)


@check(
    "ADAPTER_COVERAGE", WARNING, needs=(has_pairs,),
    why="peft initialises absent tensors and only warns: the model is partly the base",
    fix="save the adapter again with all tensors gathered; see also {with_base}",
    issues="OpenRLHF #651, OpenRLHF #682, ms-swift #6481",
)  # fmt: skip
def uncovered_targets(source: Source) -> Iterator[Fault]:
    """Target modules, or layers, without a LoRA pair."""
    keys, config = source.once(adapter_keys), source.once(adapter_config)
    if not isinstance(config.target_modules, str):
        ends = {end for module in keys.pairs for end in _ends(plain_module(module))}
        absent = [name for name in config.target_modules if name not in ends]
        if absent:
            severity = ERROR if len(absent) == len(config.target_modules) else None
            text, expected = "no pair of that name", "one for each target"
            yield Fault(text, expected, ADAPTER_CONFIG, absent, severity=severity)
    if source.base is not None or config.layers_to_transform:
        return  # the base tells which layers have the module
    layers: dict[str, set[int]] = {}
    for module in keys.pairs:
        if number := _LAYER.search(module):
            layers.setdefault(pattern_of(module), set()).add(int(number[1]))
    total = max((max(numbers) for numbers in layers.values()), default=-1) + 1
    for pattern, there in layers.items():
        lacking = [number for number in range(min(there), total) if number not in there][:1000]
        if lacking and len(there) * 2 > total:  # else layers of two kinds alternate
            names = [f"{pattern}: layer {number}" for number in lacking]
            yield Fault(f"{len(there)} of {total} layers", "a pair in every layer", tensors=names)


def _ends(module: str) -> Iterator[str]:
    """Yield a module's name and its ends by dotted parts: `up_proj`, `mlp.up_proj`, ..."""
    parts = module.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))


_HEADS = ("classifier", "score")
"""peft adds both to modules_to_save for a classifier, which has one of them."""
_ALL_HEADS = ("v_head", *_HEADS)
"""`heads` covers them."""
_EMBEDDINGS = ("embed_tokens", "lm_head", "wte", "word_embeddings", "embed_in", "embed_out")
"""Modules that `save_embedding_layers="auto"` stores in full when the vocabulary has grown."""


@check(
    "ADAPTER_SAVED", ERROR, needs=(has_pairs,),
    why="peft fails with KeyError, or drops tensors, or assigns token rows to other tokens",
    fix="restore modules_to_save, bias and trainable_token_indices, or save the adapter again",
    issues="LLaMA-Factory #7665, peft #2450",
)  # fmt: skip
def saved_modules(source: Source) -> Iterator[Fault]:
    """Full tensors and token rows that disagree with adapter_config.json."""
    keys, config = source.once(adapter_keys), source.once(adapter_config)
    wanted = set(config.modules_to_save)
    if config.task_type in ("SEQ_CLS", "TOKEN_CLS"):
        wanted -= set(_HEADS)
    if any(_is_of(_ALL_HEADS, key) for key in keys.whole):
        wanted -= set(_ALL_HEADS)  # ms-swift names every possible head
    absent = sorted(name for name in wanted if not any(_is_of([name], key) for key in keys.whole))
    if absent:
        text = "no tensor of a name in modules_to_save"
        yield Fault(text, "the module in full", ADAPTER_CONFIG, absent)
    odd = [
        keys.keys[name]
        for name in keys.whole
        if not _is_of((*config.modules_to_save, *_EMBEDDINGS, *_ALL_HEADS), name)
        and not (name.endswith(".bias") and config.bias != "none")
    ]
    if odd:
        text, expected = f"{len(odd)} full tensors", "named by modules_to_save or bias"
        yield Fault(text, expected, tensors=odd, severity=WARNING)
    rows = {len(indices) for indices in config.token_indices.values()}
    if config.token_indices and not keys.tokens:
        yield Fault("trainable_token_indices, and no rows", "their rows", file=ADAPTER_CONFIG)
    for name, tensor in keys.tokens.items():
        if tensor.shape and 0 not in tensor.shape and tensor.shape[0] not in rows:
            expected = f"{', '.join(map(str, sorted(rows))) or 'no'} indices"
            yield Fault(f"{tensor.shape[0]} rows", expected, tensors=[keys.keys[name]])


def _is_of(modules: Iterable[str], key: str) -> bool:
    """Return True if a key belongs to a saved module that one of the names, or its end, denotes."""
    at = key.rpartition(".")[0]
    return any(at.endswith(module) or f".{module}." in f".{at}." for module in modules)


@check(
    "TARGET_PARAMETERS", WARNING, needs=(ADAPTER,),
    why="for some families vLLM and SGLang drop the experts' part of it without a word",
    fix="serve it merged: {merge}; or ask the server whether it applies it: verify",
    issues="vLLM PR #41384, vLLM PR #52198, sglang PR #25528",
)  # fmt: skip
def target_parameters(source: Source) -> Iterator[Fault]:
    """An adapter of parameters (`target_parameters`), which servers may leave out."""
    targets = texts(source.config(ADAPTER_CONFIG).get("target_parameters"))
    if targets:
        expected = "target_modules, or a server that applies them"
        yield Fault(some(targets), expected, file=ADAPTER_CONFIG)


_PLAIN_INIT = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Initialisers that do not change the base (`PEFTHelper._init_is_supported` of vLLM)."""
_REFUSED = ("lora_bias", "alora_invocation_tokens", "layer_replication", "use_bdlora", "use_qalora")
"""Settings that vLLM refuses, and that a merge does not cover."""
_REQUIRED = ("r", "lora_alpha", "target_modules")
"""Settings for which peft has a default and vLLM has none (`PEFTHelper.from_dict`)."""
_WITH_PEFT = "serve it with transformers and peft, or train plain LoRA"
_PLAIN = (
    "save it as a plain LoRA with save_pretrained(..., "
    "path_initial_model_for_weight_conversion=INITIAL_ADAPTER)"
)
_TOWER = re.compile(
    r"(^|\.)(visual|vision_tower|vision_model|audio_tower|vision_encoder|multi_modal_projector"
    r"|image_tower|mlp1)\."
)
_EMBEDDING_OF_BASE = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")


@check(
    "VLLM_LORA", WARNING, needs=(is_lora,),
    why="vLLM refuses to load the adapter, or ignores parts of it, as it is started by default",
    fix="merge it before serving: {merge}",
    issues="vLLM #2847, LLaMA-Factory PR #3794, gpustack #5438",
)  # fmt: skip
def refused_by_vllm(source: Source) -> Iterator[Fault]:
    """Settings and tensors of an adapter that vLLM refuses as it is started by default."""
    raw = source.config(ADAPTER_CONFIG)
    yield from _refused_rank(source, raw)
    heads = [name for name in texts(raw.get("modules_to_save")) if name not in _HEADS]
    init = raw.get("init_lora_weights")
    table = (  # what, expected, fix
        (raw.get("use_dora") and "use_dora true", "plain LoRA", ""),
        (heads and f"modules_to_save {', '.join(heads)}", "none, or a classification head", ""),
        *((raw.get(name) and f"{name} {raw[name]!r}", "not set", _WITH_PEFT) for name in _REFUSED),
        (isinstance(init, str) and init.lower() not in _PLAIN_INIT
         and f"init_lora_weights {init!r}", "not set", _PLAIN),
        (raw.get("bias") not in (None, "none") and f"bias {raw.get('bias')!r}", "not set", ""),
        *((name not in raw and f"no {name}", "set explicitly", "set it") for name in _REQUIRED),
    )  # fmt: skip
    for text, expected, fix in table:
        if text:
            yield Fault(text, expected, file=ADAPTER_CONFIG, fix=fix)
    keys = source.once(adapter_keys)
    named = [*_HEADS, *texts(raw.get("modules_to_save"))]
    odd = [keys.keys[name] for name in keys.tokens]
    odd += [
        keys.keys[name]
        for name in keys.whole
        if not keys.keys[name].endswith(_EMBEDDING_OF_BASE)
        and not any(f".{part}." in f".{name}" for part in named)
    ]
    if odd:
        text = f"{len(odd)} tensors outside LoRA pairs"
        yield Fault(text, "only lora_A and lora_B", tensors=odd)
    towers = [name for name in keys.pairs if _TOWER.search(name)]
    if towers:
        text, file = f"{len(towers)} pairs on a tower", keys.pairs[towers[0]].file
        fix = "train with target_modules of the language model alone, or merge it"
        yield Fault(text, "pairs on the language model", file, towers, fix=fix)


def _refused_rank(source: Source, raw: Mapping[str, Any]) -> Iterator[Fault]:
    patterns = raw.get("rank_pattern")
    ranks = [raw.get("r"), *(patterns.values() if isinstance(patterns, Mapping) else ())]
    highest = max((rank for rank in map(whole, ranks) if rank is not None), default=0)
    if highest <= DEFAULT_LORA_RANK:
        return
    allowed = next((rank for rank in known().lora_ranks if rank >= highest), None)
    expected, fix = f"at most {known().lora_ranks[-1]}: merge it", ""
    if allowed:
        base = source.base.folder.root if source.base is not None else "<base>"
        expected = f"{DEFAULT_LORA_RANK}, the default, or --max-lora-rank {allowed}"
        fix = f"vllm serve {base} --enable-lora --max-lora-rank {allowed}"
    yield Fault(f"rank {highest}", expected, file=ADAPTER_CONFIG, fix=fix)
