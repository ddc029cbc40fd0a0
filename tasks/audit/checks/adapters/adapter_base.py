"""Check a PEFT adapter against its base: coverage, sizes, vocabulary, ties."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tasks.audit.catalogue.adapters import Adapters
from tasks.audit.catalogue.model import Configuration
from tasks.audit.checks.adapters.adapter_keys import (
    AdapterKeys,
    Pair,
    plain_module,
    sort_keys,
    tail_of,
)
from tasks.audit.checks.adapters.adapter_tensors import is_cheap, oversized_settings
from tasks.audit.checks.text.embeddings import Embeddings, embeddings_of
from tasks.audit.config_fields import is_multimodal, text_config
from tasks.audit.finding import Finding
from tasks.audit.recognise import ADAPTER_CONFIG
from tasks.audit.source import Source
from tasks.core.errors import first_and_more
from tasks.weights.adapters.config import AdapterConfig, parse_config
from tasks.weights.adapters.live import EMBEDDING, LINEAR, OTHER, LiveModel
from tasks.weights.adapters.targets import targeted_modules
from tasks.weights.files.names import PEFT_PREFIX
from tasks.weights.quantized.config_fields import is_fp8, is_packed, refusal, remedy, stored
from tasks.weights.quantized.fp8 import DTYPE
from tasks.weights.quantized.source import fp8_findings

_ELSEWHERE = ("expert", "moe", "router", ".gate.")
"""Parts of names of modules that transformers 5 fuses and names differently in memory."""
_TEXT, _WRAPPED = "model.layers.", re.compile(r"(model\.)?language_model\..*\.\d+\.")
_TEXT_NAMES_TAKEN = ("ministral3", "mistral")
"""Text models whose names vLLM maps to the multimodal model (its `mistral3.py`)."""
_WIDTH = 8
_MANY = 200
_TIED = ("lm_head", "embed_out")
"""Names of output embeddings, which are not on disk if they are tied."""


@dataclass(frozen=True)
class Base:
    """Modules of a base model, from its headers.

    Attributes:
        modules: shape of the weight of every module, by its name on disk.
        tails: the same by the end of the name (see `tail_of`); None if two modules share it, or if
            the module has no tensor `weight`.
        embeddings: keys of its embeddings.
        plain: True if its weights have the shapes of the modules.
    """

    modules: Mapping[str, tuple[int, ...]]
    tails: Mapping[str, tuple[int, ...] | None]
    embeddings: Embeddings
    plain: bool

    def shape_of(self, module: str) -> tuple[int, ...] | None:
        """Return the shape of a module's weight; None if it is not known for certain."""
        return self.modules.get(module) or self.tails.get(tail_of(module))

    def has(self, module: str) -> bool:
        """Return True if it has the module, under this name or inside another model."""
        tail = tail_of(module)
        tied = not self.embeddings.output and tail in _TIED
        return module in self.modules or tail in self.tails or tied


def read_base(source: Source) -> Base:
    """Read the modules of a base from the shapes of its tensors."""
    modules: dict[str, tuple[int, ...]] = {}
    tails: dict[str, tuple[int, ...] | None] = {}
    others: set[str] = set()
    for key, tensor in source.tensors.items():
        module, _, part = key.rpartition(".")
        if part == "weight":
            modules[module], tail = tensor.shape, tail_of(module)
            tails[tail] = tensor.shape if tail not in tails else None
        else:
            others.add(tail_of(module))
    config = source.config()
    embeddings = embeddings_of(source.tensors, config)
    tails = {**dict.fromkeys(others), **tails}
    return Base(modules, tails, embeddings, plain=stored(config) is None or is_fp8(config))


def check(source: Source) -> Iterator[Finding]:
    """Check everything that needs both the adapter and the base."""
    if not source.is_adapter or source.base is None or not source.base.is_model:
        return
    raw = source.config(ADAPTER_CONFIG)
    yield from _packed(source, source.base)
    if raw.get("peft_type") != "LORA" or oversized_settings(raw):
        return
    if not source.base.weights.is_whole or not source.tensors:
        return
    config, _ = parse_config(raw)
    base = read_base(source.base)
    keys = sort_keys(source.tensors)
    unknown = [
        name for name in keys.pairs if not base.has(plain_module(name)) and not _is_elsewhere(name)
    ]
    if unknown:
        yield Adapters.ADAPTER_NO_MODULE.at(
            keys.pairs[unknown[0]].file, unknown,
            found=f"{len(unknown)} of {len(keys.pairs)} pairs",
            expected="modules of the base",
        )  # fmt: skip
    yield from _text_names(keys, source.base)
    if raw.get("task_type") != "FEATURE_EXTRACTION":  # trained without a head: other names
        yield from _names(keys, base)
    yield from _shapes(keys, base)
    yield from _vocabulary(keys, base, source.base)
    yield from _ties(keys, base)
    if source.weights.is_whole and not unknown:
        yield from _coverage(keys, config, base)


def _packed(source: Source, base: Source) -> Iterator[Finding]:
    name = source.config(ADAPTER_CONFIG).get("base_model_name_or_path")
    yield from _undecodable(base)
    if is_packed(base.config()):
        yield Adapters.QLORA_BASE.at(
            ADAPTER_CONFIG, found=f"a base of {stored(base.config())}", expected="a merge into the "
            "dequantised base",
        )  # fmt: skip
    elif isinstance(name, str) and name.lower().rstrip("/").endswith(("-bnb-4bit", "-4bit")):
        yield Adapters.QLORA_BASE.at(
            ADAPTER_CONFIG, found=f"trained on {name}, but base is in 16 bits",
            expected="the base that it was trained on, dequantised",
        )  # fmt: skip


def _undecodable(base: Source) -> Iterator[Finding]:
    """Report weights that `deliver` cannot decode, in its words."""
    config, root = base.config(), base.folder.root
    refused = refusal(config, root)
    findings = [refused.text] if refused else []
    in_fp8 = is_fp8(config) or any(tensor.dtype == DTYPE for tensor in base.tensors.values())
    if refused is None and in_fp8 and base.weights.is_whole:
        findings = fp8_findings(base.tensors, config)
    if findings:
        text = f"{root}: {first_and_more(findings)}"
        yield Adapters.BASE_QUANTISED.at("", found=text, expected=remedy(root))


def _text_names(keys: AdapterKeys, base: Source) -> Iterator[Finding]:
    """Report names of a text-only model if the base stores it inside a multimodal one."""
    config = base.config()
    if not is_multimodal(config) or text_config(config).get("model_type") in _TEXT_NAMES_TAKEN:
        return
    wrapped = [key for key in base.tensors if _WRAPPED.match(key)]
    names = [name for name in keys.pairs if name.startswith(_TEXT)]
    if names and wrapped and not any(key.startswith(_TEXT) for key in base.tensors):
        yield Configuration.ADAPTER_TEXT_NAMES.at(
            keys.pairs[names[0]].file, names, found=f"{names[0]}",
            expected=f"names of the multimodal model, as {wrapped[0].rpartition('.')[0]}",
        )  # fmt: skip


def _names(keys: AdapterKeys, base: Base) -> Iterator[Finding]:
    """Report pairs whose names have one `model.` less or more than the base's modules."""
    renamed = {name: _meant(plain_module(name), base) for name in keys.pairs}
    if renamed and all(renamed.values()):
        name, right = next(iter(renamed.items()))
        yield Adapters.ADAPTER_MODULE_NAMES.at(
            keys.pairs[name].file, list(renamed),
            found=f"{PEFT_PREFIX}{name}", expected=f"{PEFT_PREFIX}{right}",
        )  # fmt: skip


def _meant(module: str, base: Base) -> str:
    """Return the module of the base with one `model.` more or less; "" if the name is right.

    Names of a base without `model.` tell nothing: it may be saved without its head.
    """
    near = [f"model.{module}", module.removeprefix("model.")]
    there = [name for name in near if name.startswith("model.") and name in base.modules]
    return there[0] if there and module not in base.modules else ""


def _is_elsewhere(module: str) -> bool:
    return any(part in f".{module}." for part in _ELSEWHERE)


def _shapes(keys: AdapterKeys, base: Base) -> Iterator[Finding]:
    if not base.plain:
        return
    wrong: dict[tuple[str, str], list[str]] = {}
    file = ""
    for name, pair in keys.pairs.items():
        shape, sizes = base.shape_of(plain_module(name)), _sizes(pair)
        if shape is None or sizes is None or len(shape) != 2 or _is_elsewhere(name):
            continue
        if sizes not in (shape, shape[::-1]):  # GPT-2 stores layers and embeddings transposed
            texts = f"a pair for {list(sizes)}", f"{list(shape)}, as the base has"
            wrong.setdefault(texts, []).append(name)
            file = pair.file
    for (actual, expected), names in list(wrong.items())[:_WIDTH]:
        yield Adapters.ADAPTER_SHAPE.at(file, names, found=actual, expected=expected)


def _sizes(pair: Pair) -> tuple[int, int] | None:
    """Return (out, in) of the weight that a LoRA pair belongs to; None if it is unknown."""
    if pair.a is None or pair.b is None or len(pair.a.shape) != 2 or len(pair.b.shape) != 2:
        return None
    sizes = pair.b.shape[0], pair.a.shape[1]
    return None if 0 in sizes else sizes


def _vocabulary(keys: AdapterKeys, base: Base, source: Source) -> Iterator[Finding]:
    wanted = base.embeddings.input
    if not wanted:
        return
    rows = source.tensors[wanted].shape[0]
    known = {key.rpartition(".")[0].rpartition(".")[2] for key in _both(base.embeddings)}
    resized = [
        name
        for name, tensor in keys.whole.items()
        if plain_module(name.rpartition(".")[0]).rpartition(".")[2] in known
        and len(tensor.shape) == 2
        and tensor.shape[0] not in (0, rows)
    ]
    if resized:
        tensor = keys.whole[resized[0]]
        yield Adapters.ADAPTER_VOCABULARY.at(
            tensor.file, [keys.keys[key] for key in resized], found=f"{tensor.shape[0]} rows",
            expected=f"{rows}, as the base has",
        )  # fmt: skip


def _both(embeddings: Embeddings) -> set[str]:
    """Return the keys of both embeddings; a tied output embedding is not on disk."""
    return {key for key in (embeddings.input, embeddings.output or "lm_head.weight") if key}


def _ties(keys: AdapterKeys, base: Base) -> Iterator[Finding]:
    if not base.embeddings.tied:
        return
    leaves = [name.rpartition(".")[0].rpartition(".")[2] for name in sorted(_both(base.embeddings))]
    changed = {plain_module(name) for name in keys.pairs}
    changed |= {plain_module(name.rpartition(".")[0]) for name in keys.whole}
    touched = [name for name in sorted(changed) if name.rpartition(".")[2] in leaves]
    if touched:
        yield Adapters.ADAPTER_PARTS_TIE.at(
            "", touched, found="changed by the adapter; the base ties both embeddings",
            expected="a merge that unties them, or training of both as one",
        )  # fmt: skip


def _coverage(keys: AdapterKeys, config: AdapterConfig, base: Base) -> Iterator[Finding]:
    """Report target modules of the base without a LoRA pair, by peft's rules for names."""
    settings = (config.exclude_modules, config.layers_pattern, config.modules_to_save)
    patterns = [
        pattern
        for setting in settings
        for pattern in ((setting,) if isinstance(setting, str) else setting)
    ]
    if isinstance(config.target_modules, str) or not is_cheap(*patterns):
        return
    have = {plain_module(name) for name in keys.pairs}
    if not have <= set(base.modules):
        return  # the base names its modules differently in memory: names cannot be compared
    heads = {name.rpartition(".")[0]: EMBEDDING for name in _both(base.embeddings)}
    # Separate experts on disk are one parameter in transformers 5, and not modules.
    fused = not any(_is_elsewhere(name) for name in have)
    kinds = {
        name: heads.get(name, LINEAR if len(shape) == 2 else OTHER)
        for name, shape in base.modules.items()
        if len(shape) > 1 and not (fused and _is_elsewhere(name))
    }
    if len(config.target_modules) > _MANY:  # a list of all modules by full name
        wanted = [name for name in config.target_modules if name in kinds]
    else:
        wanted = targeted_modules(config, LiveModel({}, kinds, {}))
    lacking = [name for name in wanted if name not in have]
    if lacking:
        yield Adapters.ADAPTER_COVERAGE.at(
            "", lacking, found=f"{len(have)} of {len(have) + len(lacking)} target modules",
            expected="a pair for each",
        )  # fmt: skip
