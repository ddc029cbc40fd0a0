"""PEFT adapters: their settings, their tensors, and what vLLM accepts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from tasks.audit.check import ADAPTER, ERROR, INFO, MODEL, WARNING, Fault, check, some
from tasks.audit.folder import StoredTensor
from tasks.audit.known import DEFAULT_LORA_RANK, known, texts, whole
from tasks.audit.repair import adapter_name
from tasks.audit.source import ADAPTER_CONFIG, CONFIG, Kind, Source
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


def adapter_config(source: Source) -> AdapterConfig:
    """Return the settings of a LoRA adapter."""
    config, _ = parse_config(source.config(ADAPTER_CONFIG))
    if any(name in source.folder.files for name in SIDE_FILES):  # LLaMA-Factory's value head
        saved = tuple(name for name in config.modules_to_save if name != "v_head")
        config = replace(config, modules_to_save=saved)
    return config


@check(
    "ADAPTER_IS_NO_MODEL", INFO, needs=(ADAPTER,),
    why="an engine that gets it as a model fails: 'No supported config format found' (unsloth), a "
    "missing config.json (vLLM), a traceback (LLaMA-Factory)",
    fix="serve it beside its base, {serve}, or merge it, {merge}",
    issues="unsloth #1191, LLaMA-Factory #4896, LLaMA-Factory #7511",
)  # fmt: skip
def adapter_is_no_model(source: Source) -> Iterator[Fault]:
    """An adapter, which is not a model by itself."""
    name = source.config(ADAPTER_CONFIG).get("base_model_name_or_path")
    yield Fault("an adapter", f"to be served with its base, {name or 'which it does not name'}")


@check(
    "CONFIG_BESIDE_ADAPTER", WARNING, needs=(ADAPTER,),
    why="engines treat the folder as a full model and find no weights, or load adapter_model as "
    "one. OpenRLHF writes the base's config.json into every adapter",
    fix="remove config.json from the adapter's folder",
    issues="LLaMA-Factory #4896, LLaMA-Factory #7511",
)  # fmt: skip
def config_beside_adapter(source: Source) -> Iterator[Fault]:
    """A model's config.json in an adapter's folder."""
    if CONFIG in source.folder.files:
        yield Fault("present", f"only {ADAPTER_CONFIG}", file=CONFIG)


@check(
    "ADAPTER_TYPE", WARNING, needs=(ADAPTER,),
    why="vLLM serves only LoRA; Plumbline checks and merges only LoRA",
    fix="merge it with peft's merge_and_unload, and audit the merged model",
)  # fmt: skip
def adapter_type(source: Source) -> Iterator[Fault]:
    """An adapter that is not LoRA."""
    raw = source.config(ADAPTER_CONFIG)
    if raw and raw.get("peft_type") != "LORA":
        yield Fault(f"peft_type {raw.get('peft_type')!r}", "'LORA'", file=ADAPTER_CONFIG)


def has_settings(source: Source) -> bool:
    """Return True where settings of LoRA are used: an adapter, or shards, for gathering."""
    return is_lora(source) or (source.kind is Kind.SHARDS and ADAPTER_CONFIG in source.folder.files)


@check(
    "ADAPTER_CONFIG", ERROR, needs=(has_settings,),
    why="peft and vLLM refuse to load the adapter; with a lora_alpha of 0, which verl's merger "
    "writes if it does not find the training metadata, it has no effect",
    fix="restore the adapter_config.json of the run that trained it",
    issues="verl PR #1821, verl PR #5326, verl #7285",
)  # fmt: skip
def invalid_settings(source: Source) -> Iterator[Fault]:
    """Invalid settings in adapter_config.json."""
    raw = source.config(ADAPTER_CONFIG)
    for key in ("r", "lora_alpha"):
        value = raw.get(key, 8)
        number = type(value) is int or (key == "lora_alpha" and type(value) is float)
        if not number or not value > 0:
            yield Fault(f"{key} {value!r}", "a positive number", file=ADAPTER_CONFIG)
    targets = raw.get("target_modules")
    if not (texts(targets) or raw.get("target_parameters") or raw.get("trainable_token_indices")):
        text = f"target_modules {targets!r}"
        yield Fault(text, "names, or a pattern", file=ADAPTER_CONFIG)


@check(
    "ADAPTER_BASE_UNSAID", WARNING, needs=(has_settings,),
    why="merging into a wrong base of the same shapes raises no error anywhere",
    fix="write base_model_name_or_path (and revision) into adapter_config.json",
    issues="LLaMA-Factory #4913",
)  # fmt: skip
def base_unsaid(source: Source) -> Iterator[Fault]:
    """adapter_config.json does not name the base."""
    if not source.config(ADAPTER_CONFIG).get("base_model_name_or_path"):
        text = "base_model_name_or_path is empty"
        yield Fault(text, "the base's name", file=ADAPTER_CONFIG)


_MUTATING = ("pissa", "olora", "corda", "loftq")


@check(
    "ADAPTER_INIT", WARNING, needs=(has_settings,),
    why="the adapter fits the base as training changed it, not the published one: merging it into "
    "the published base gives a wrong model, and vLLM refuses the adapter",
    fix="save it as a plain LoRA with save_pretrained(..., "
    "path_initial_model_for_weight_conversion=INITIAL_ADAPTER)",
)  # fmt: skip
def mutating_init(source: Source) -> Iterator[Fault]:
    """An initialiser that changed the base's weights."""
    init = source.config(ADAPTER_CONFIG).get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_MUTATING):
        text = f"init_lora_weights {init!r}"
        yield Fault(text, "true, or gaussian", file=ADAPTER_CONFIG)


@check(
    "ADAPTER_HALF_PAIR", ERROR, needs=(has_pairs,),
    why="peft initialises the other half and only warns ('Found missing adapter keys'): the module "
    "is untrained, or random",
    fix="save the adapter again from the training run",
    issues="OpenRLHF #651",
)  # fmt: skip
def half_pairs(source: Source) -> Iterator[Fault]:
    """One half of a LoRA pair."""
    pairs = source.once(adapter_keys).pairs
    for half, other in (("A", "B"), ("B", "A")):
        alone = [
            name
            for name, pair in pairs.items()
            if getattr(pair, half.lower()) and not getattr(pair, other.lower())
        ]
        if alone:
            text = f"{len(alone)} lora_{half} without lora_{other}"
            yield Fault(text, "both for every module", pairs[alone[0]].file, alone)


@check(
    "ADAPTER_RANK", ERROR, needs=(has_pairs,),
    why="peft refuses to load it with 'size mismatch'; if only alpha / r is wrong, the adapter is "
    "applied with the wrong scale",
    fix="restore the adapter_config.json of the run that trained it",
)  # fmt: skip
def wrong_ranks(source: Source) -> Iterator[Fault]:
    """Ranks of tensors that disagree with adapter_config.json."""
    config = source.once(adapter_config)
    if len(config.rank_pattern) > _MOST_PATTERNS or not is_cheap(*config.rank_pattern):
        return
    wrong: dict[tuple[str, str, str], list[str]] = {}
    for module, pair in source.once(adapter_keys).pairs.items():
        if pair.a is None or pair.b is None or len(pair.a.shape) < 2 or len(pair.b.shape) < 2:
            continue
        ranks = pair.a.shape[0], pair.b.shape[1]
        if 0 in pair.a.shape or 0 in pair.b.shape:
            continue  # `files` reports empty tensors
        rank = config.rank_of(plain_module(module))
        # A targeted parameter of experts has the pairs of all experts in one tensor.
        stacked = config.target_parameters and ranks[0] % rank == 0
        if ranks[0] != ranks[1] or (ranks[0] != rank and not stacked):
            text = f"rank {ranks[0]} by {ranks[1]}", f"rank {rank}, as r says", pair.a.file
            wrong.setdefault(text, []).append(module)
    for (actual, expected, file), modules in wrong.items():
        yield Fault(actual, expected, file, modules)


@check(
    "ADAPTER_PATTERN", WARNING, needs=(has_pairs,),
    why="a pattern without effect: peft scales the modules that it was meant for by lora_alpha / r "
    "and says nothing; if their names changed after training, the scale is wrong",
    fix="correct the names, or remove the key if training did not use it either",
)  # fmt: skip
def dead_patterns(source: Source) -> Iterator[Fault]:
    """A key of rank_pattern or alpha_pattern that matches none of the adapter's modules."""
    config = source.once(adapter_config)
    names = [plain_module(name) for name in source.once(adapter_keys).pairs]
    if config.target_parameters:
        return  # names of targeted parameters are not in the keys
    for setting in ("rank_pattern", "alpha_pattern"):
        dead = [
            pattern
            for pattern in islice(getattr(config, setting), _MOST_PATTERNS)
            if is_cheap(pattern)
            and not any(re.match(PATTERN.replace("{}", pattern), name) for name in names)
        ]
        if dead and names:
            text = f"{setting}: {some(dead)}"
            yield Fault(text, "names of its modules", file=ADAPTER_CONFIG)


@check(
    "ADAPTER_DORA", ERROR, needs=(has_pairs,),
    why="with use_dora and no magnitudes peft uses the base's norms and only warns, without "
    "use_dora it silently drops them: either way the merged model is not the trained one",
    fix="restore use_dora of the training run, or the tensors lora_magnitude_vector",
)  # fmt: skip
def wrong_dora(source: Source) -> Iterator[Fault]:
    """use_dora and DoRA's magnitudes disagree."""
    config, pairs = source.once(adapter_config), source.once(adapter_keys).pairs
    able = {n: p for n, p in pairs.items() if not config.target_parameters and p.a and p.b}
    having = [name for name, pair in pairs.items() if pair.magnitude]
    lacking = [name for name in able if not able[name].magnitude]
    if config.dora and lacking:
        text = f"use_dora, {len(lacking)} modules without magnitude"
        expected = "a lora_magnitude_vector for every module"
        yield Fault(text, expected, ADAPTER_CONFIG, lacking)
    if having and not config.dora:
        text = f"{len(having)} magnitudes, use_dora is not set"
        yield Fault(text, "use_dora true", ADAPTER_CONFIG, having)


@check(
    "ADAPTER_COVERAGE", WARNING, needs=(has_pairs,),
    why="peft initialises tensors that are not in the file and only warns, axolotl's merge does "
    "not even warn: the model is partly trained and partly the base",
    fix="save the adapter again from the training run, with all of its tensors gathered; "
    "{with_base} tells whether the base has such modules",
    issues="OpenRLHF #651, OpenRLHF #682, ms-swift #6481",
)  # fmt: skip
def uncovered_targets(source: Source) -> Iterator[Fault]:
    """Target modules, or layers, without a LoRA pair."""
    keys, config = source.once(adapter_keys), source.once(adapter_config)
    if not isinstance(config.target_modules, str):
        ends = {end for module in keys.pairs for end in _ends(plain_module(module))}
        absent = [name for name in config.target_modules if name not in ends]
        if absent:
            every = len(absent) == len(config.target_modules)
            text = f"no pair of {'any target' if every else 'that name'}"
            severity = ERROR if every else None
            expected = "one for each target"
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
    why="peft 0.21 fails with KeyError for modules that are not saved, earlier versions keep the "
    "base's weights; it drops tensors that no setting explains, and assigns token rows to other "
    "tokens; vLLM refuses 'unsupported LoRA weight'",
    fix="restore modules_to_save, bias and trainable_token_indices of the training run, or save "
    "the adapter again with these modules gathered",
    issues="LLaMA-Factory #7665, peft #2450",
)  # fmt: skip
def saved_modules(source: Source) -> Iterator[Fault]:
    """Full tensors and token rows that disagree with adapter_config.json."""
    keys, config = source.once(adapter_keys), source.once(adapter_config)
    wanted = set(config.modules_to_save)
    if config.task_type in ("SEQ_CLS", "TOKEN_CLS"):
        wanted -= set(_HEADS)
    if any(_is_of(head, key) for head in _ALL_HEADS for key in keys.whole):
        wanted -= set(_ALL_HEADS)  # ms-swift names every possible head
    absent = sorted(name for name in wanted if not any(_is_of(name, key) for key in keys.whole))
    if absent:
        text = "no tensor of a name in modules_to_save"
        yield Fault(text, "the module in full", ADAPTER_CONFIG, absent)
    odd = []
    for name in keys.whole:
        module, _, part = name.rpartition(".")
        saved = any(_is_of(each, name) for each in config.modules_to_save)
        embedding = not set(_EMBEDDINGS).isdisjoint(module.split("."))
        head = any(f".{head}." in f".{name}." for head in _ALL_HEADS)
        if not (saved or embedding or head or (part == "bias" and config.bias != "none")):
            odd.append(keys.keys[name])
    if odd:
        expected = "named by modules_to_save or bias"
        yield Fault(f"{len(odd)} full tensors", expected, tensors=odd, severity=WARNING)
    rows = {len(indices) for indices in config.token_indices.values()}
    if config.token_indices and not keys.tokens:
        yield Fault("trainable_token_indices, and no rows", "their rows", file=ADAPTER_CONFIG)
    for name, tensor in keys.tokens.items():
        if tensor.shape and 0 not in tensor.shape and tensor.shape[0] not in rows:
            expected = f"{', '.join(map(str, sorted(rows))) or 'no'} indices"
            yield Fault(f"{tensor.shape[0]} rows", expected, tensors=[keys.keys[name]])


def _is_of(module: str, key: str) -> bool:
    """Return True if a key belongs to a saved module that this name, or its end, denotes."""
    at = key.rpartition(".")[0]
    return at.endswith(module) or f".{module}." in f".{at}."


@check(
    "VLLM_ARCHITECTURE", ERROR, needs=(MODEL,),
    why="vLLM refuses: 'Model architectures [...] are not supported for now'",
    fix="name the class of the base; a reward model is a *ForSequenceClassification with "
    "num_labels 1",
    issues="OpenRLHF #1039, LLaMA-Factory #4379",
)  # fmt: skip
def vllm_architecture(source: Source) -> Iterator[Fault]:
    """A class that vLLM does not have."""
    names, lists = texts(source.config().get("architectures")), known()
    if not names or any(lists.serves(name) for name in names) or "CriticModel" in names:
        return  # a critic is not served: HEAD_OF_CRITIC
    last = next((lists.last_version[name] for name in names if name in lists.last_version), "")
    rest, severity = " or of transformers", ERROR
    if last:
        rest, severity = f"; {last} was the last version that had this one", WARNING
    elif any(name in lists.classes for name in names):
        rest, severity = "; it may run the class of transformers", WARNING
    elif source.config().get("auto_map"):
        rest, severity = "; this one needs --trust-remote-code", WARNING
    text = f"architectures {', '.join(names)}"
    yield Fault(text, f"a class of vLLM {lists.vllm}{rest}", file=CONFIG, severity=severity)


_PLAIN_INIT = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Initialisers that do not change the base (`PEFTHelper._init_is_supported` of vLLM)."""
_REFUSED = ("lora_bias", "alora_invocation_tokens", "layer_replication", "use_bdlora", "use_qalora")
"""Settings that vLLM refuses, and that a merge does not cover."""
_REQUIRED = ("r", "lora_alpha", "target_modules")
"""Settings for which peft has a default and vLLM has none (`PEFTHelper.from_dict`)."""
_WITH_PEFT = "serve it with transformers and peft, or train plain LoRA"
_PLAIN = (
    "save it as a plain LoRA with save_pretrained(..., "
    "path_initial_model_for_weight_conversion=INITIAL_ADAPTER), or merge it into the base as "
    "training changed it, saved with get_base_model().save_pretrained"
)
_TOWER = re.compile(
    r"(^|\.)(visual|vision_tower|vision_model|audio_tower|vision_encoder|multi_modal_projector"
    r"|image_tower|mlp1)\."
)
_EMBEDDING_OF_BASE = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")


@check(
    "VLLM_LORA", WARNING, needs=(is_lora,),
    why="vLLM refuses to load the adapter: 'LoRA rank 64 is greater than max_lora_rank 16', 'vLLM "
    "does not yet support DoRA', 'base_model.model.lm_head.weight is unsupported LoRA weight'; "
    "pairs on a tower are refused, or ignored unless the engine has tower adapters",
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
    yield from _refused_keys(source, raw)


def _refused_rank(source: Source, raw: Mapping[str, Any]) -> Iterator[Fault]:
    patterns = raw.get("rank_pattern")
    ranks = [raw.get("r"), *(patterns.values() if isinstance(patterns, Mapping) else ())]
    highest = max((rank for rank in map(whole, ranks) if rank is not None), default=0)
    if highest > DEFAULT_LORA_RANK:
        allowed = next((rank for rank in known().lora_ranks if rank >= highest), None)
        base = source.base.folder.root if source.base is not None else "<base>"
        yield Fault(
            f"rank {highest}",
            f"{DEFAULT_LORA_RANK}, the default, or --max-lora-rank {allowed}"
            if allowed
            else f"at most {known().lora_ranks[-1]}: merge it",
            file=ADAPTER_CONFIG,
            fix=f"vllm serve {base} --enable-lora --max-lora-rank {allowed}" if allowed else "",
        )


def _refused_keys(source: Source, raw: Mapping[str, Any]) -> Iterator[Fault]:
    keys = source.once(adapter_keys)
    named = [*_HEADS, *texts(raw.get("modules_to_save"))]
    odd = [keys.keys[name] for name in keys.tokens]
    for name in keys.whole:
        key = keys.keys[name]
        if not key.endswith(_EMBEDDING_OF_BASE) and not any(
            f".{part}." in f".{name}" for part in named
        ):
            odd.append(key)
    if odd:
        text = f"{len(odd)} tensors outside LoRA pairs"
        yield Fault(text, "only lora_A and lora_B", tensors=odd)
    towers = [name for name in keys.pairs if _TOWER.search(name)]
    if towers:
        text, file = f"{len(towers)} pairs on a tower", keys.pairs[towers[0]].file
        fix = "train with target_modules of the language model alone, or merge it"
        yield Fault(text, "pairs on the language model", file, towers, fix=fix)
