"""Adapters and their base: modules, sizes, vocabulary, ties, and the base's own storage."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tasks.audit.check import ADAPTER, BASE, ERROR, WARNING, Fault, also, check
from tasks.audit.checks.adapter import (
    adapter_config,
    adapter_keys,
    is_cheap,
    is_lora,
    plain_module,
)
from tasks.audit.known import is_multimodal, text_config
from tasks.audit.source import ADAPTER_CONFIG, Source
from tasks.audit.tensor_names import OUTPUT, Embeddings, embeddings_of, tail_of
from tasks.core.errors import first_and_more
from tasks.weights.files.names import PEFT_PREFIX
from tasks.weights.lora_config import targeted_modules
from tasks.weights.model import EMBEDDING, LINEAR, OTHER
from tasks.weights.quantized.config_fields import is_fp8, is_packed, refusal, remedy, stored
from tasks.weights.quantized.packed import DTYPE
from tasks.weights.quantized.source import fp8_findings

_ELSEWHERE = ("expert", "moe", "router", ".gate.")
"""Parts of names of modules that transformers 5 fuses and names differently in memory."""
_TEXT, _WRAPPED = "model.layers.", re.compile(r"(model\.)?language_model\..*\.\d+\.")
_TEXT_NAMES_TAKEN = ("ministral3", "mistral")
"""Text models whose names vLLM maps to the multimodal model (its `mistral3.py`)."""
_MANY = 200


@dataclass(frozen=True)
class Base:
    """Modules of a base model, from its headers.

    Attributes:
        modules: shape of the weight of every module, by its name on disk.
        tails: the same by the end of the name (see `tail_of`); None if two modules share it, or if
            the module has no tensor `weight`.
        vocabulary: names of both embeddings; a tied output embedding is not on disk.
    """

    modules: Mapping[str, tuple[int, ...]]
    tails: Mapping[str, tuple[int, ...] | None]
    embeddings: Embeddings
    vocabulary: set[str]

    def has(self, module: str) -> bool:
        """Return True if it has the module, under this name or inside another model."""
        tail = tail_of(module)
        tied = not self.embeddings.output and tail in OUTPUT
        return module in self.modules or tail in self.tails or tied


def _modules(source: Source) -> Base:
    """Read the modules of the base from the shapes of its tensors."""
    base = source.known_base
    modules: dict[str, tuple[int, ...]] = {}
    tails: dict[str, tuple[int, ...] | None] = {}
    for key, tensor in base.tensors.items():
        module, _, part = key.rpartition(".")
        if part == "weight":
            modules[module], tail = tensor.shape, tail_of(module)
            tails[tail] = tensor.shape if tail not in tails else None
    for key in base.tensors:
        tails.setdefault(tail_of(key.rpartition(".")[0]), None)
    embeddings = embeddings_of(base.tensors, base.config())
    both = (embeddings.input, embeddings.output or "lm_head.weight")
    return Base(modules, tails, embeddings, {key.removesuffix(".weight") for key in both if key})


def fits_base(source: Source) -> bool:
    """Return True for a LoRA adapter and a base whose tensors are all known."""
    base = source.base
    is_model = base is not None and base.is_model and base.weights.is_whole
    return is_model and is_lora(source) and bool(source.tensors)


@check(
    "BASE_QUANTISED", ERROR, needs=(ADAPTER, BASE),
    why="the adapter can neither be merged into such weights nor compared with them",
    fix="take the unquantised model that it was made from as base=",
    issues="ms-swift #7907, LLaMA-Factory #10328, unsloth-zoo PR #810, peft #2321, peft #2105",
)  # fmt: skip
def undecodable_base(source: Source) -> Iterator[Fault]:
    """A base whose quantised weights cannot be decoded."""
    base = source.known_base
    config, root = base.config(), base.folder.root
    refused = refusal(config)
    findings = [refused] if refused else []
    in_fp8 = is_fp8(config) or any(tensor.dtype == DTYPE for tensor in base.tensors.values())
    if not refused and in_fp8 and base.weights.is_whole:
        findings = fp8_findings(base.tensors, config)
    if findings:
        yield Fault(f"{root}: {first_and_more(findings)}", remedy(root))


@also("BASE_QUANTISED", needs=(ADAPTER, BASE))
def qlora_base(source: Source) -> Iterator[Fault]:
    """An adapter that was trained on a 4-bit base."""
    name = source.config(ADAPTER_CONFIG).get("base_model_name_or_path")
    config = source.known_base.config()
    why = "4-bit weights differ from 16-bit ones by more than most adapters change them"
    fix = "merge it with merge.base=dequantized, on the base that it was trained on"
    text = ""
    if is_packed(config):
        text = f"a base of {stored(config)}"
    elif isinstance(name, str) and name.lower().rstrip("/").endswith(("-bnb-4bit", "-4bit")):
        text = f"trained on {name}, but base is in 16 bits"
    if text:
        yield Fault(text, "the dequantised base", ADAPTER_CONFIG, (), WARNING, why, fix)


def _unknown(source: Source) -> list[str]:
    """Return the modules of pairs that the base does not have."""
    base = source.once(_modules)
    pairs = source.once(adapter_keys).pairs
    return [n for n in pairs if not base.has(plain_module(n)) and not _is_elsewhere(n)]


@check(
    "ADAPTER_MODULES", ERROR, needs=(fits_base,),
    why="peft only warns ('Found missing adapter keys'): the model answers as the base",
    fix="pass the base that adapter_config.json names, or save the adapter with save_pretrained",
    issues="LLaMA-Factory #4913, vLLM #34186, vLLM #48019",
)  # fmt: skip
def module_names(source: Source) -> Iterator[Fault]:
    """LoRA pairs for modules that the base does not have, or has under other names."""
    keys, base, unknown = source.once(adapter_keys), source.once(_modules), source.once(_unknown)
    if unknown:
        text = f"{len(unknown)} of {len(keys.pairs)} pairs"
        yield Fault(text, "modules of the base", tensors=unknown)
    # Without a task type it was trained without a head, under other names.
    if source.config(ADAPTER_CONFIG).get("task_type") != "FEATURE_EXTRACTION":
        renamed = {name: _meant(plain_module(name), base) for name in keys.pairs}
        if renamed and all(renamed.values()):
            name, right = next(iter(renamed.items()))
            actual, expected = f"{PEFT_PREFIX}{name}", f"{PEFT_PREFIX}{right}"
            yield Fault(actual, expected, tensors=list(renamed))
    model, config = source.known_base, source.known_base.config()
    if not is_multimodal(config) or text_config(config).get("model_type") in _TEXT_NAMES_TAKEN:
        return
    wrapped = [key for key in model.tensors if _WRAPPED.match(key)]
    names = [name for name in keys.pairs if name.startswith(_TEXT)]
    if names and wrapped and not any(key.startswith(_TEXT) for key in model.tensors):
        text = f"{names[0]}, a name of the text model"
        expected = f"names of the multimodal model, as {wrapped[0].rpartition('.')[0]}"
        why = "vLLM accepts it and applies only modules whose full names match, without a warning"
        yield Fault(text, expected, "", names, WARNING, why)


def _meant(module: str, base: Base) -> str:
    """Return the module of the base with one `model.` more or less; "" if the name is right.

    Names of a base without `model.` tell nothing: it may be saved without its head.
    """
    near = [f"model.{module}", module.removeprefix("model.")]
    there = [name for name in near if name.startswith("model.") and name in base.modules]
    return there[0] if there and module not in base.modules else ""


def _is_elsewhere(module: str) -> bool:
    return any(part in f".{module}." for part in _ELSEWHERE)


@check(
    "ADAPTER_SHAPE", ERROR, needs=(fits_base,),
    why="peft and vLLM refuse it with 'size mismatch': it was trained on another base",
    fix="pass the base that adapter_config.json names",
    issues="LLaMA-Factory #4913, LLaMA-Factory #3125, LLaMA-Factory #5262, LLaMA-Factory #3154",
)  # fmt: skip
def pair_shapes(source: Source) -> Iterator[Fault]:
    """LoRA pairs, or embeddings, whose sizes do not fit the base: one finding for each size."""
    base, config = source.once(_modules), source.known_base.config()
    if stored(config) is not None and not is_fp8(config):
        return  # packed weights have other shapes than their modules
    wrong: dict[tuple[str, str], list[str]] = {}
    for name, pair in source.once(adapter_keys).pairs.items():
        module = plain_module(name)
        shape = base.modules.get(module) or base.tails.get(tail_of(module))
        if pair.a is None or pair.b is None or shape is None or _is_elsewhere(name):
            continue
        if len(pair.a.shape) != 2 or len(pair.b.shape) != 2 or len(shape) != 2:
            continue
        sizes = pair.b.shape[0], pair.a.shape[1]
        if 0 not in sizes and sizes not in (shape, shape[::-1]):  # GPT-2 stores layers transposed
            text = f"a pair for {list(sizes)}", f"{list(shape)}, as the base has"
            wrong.setdefault(text, []).append(name)
    for (actual, expected), names in wrong.items():
        yield Fault(actual, expected, tensors=names)


@also("ADAPTER_SHAPE", needs=(fits_base,))
def grown_vocabulary(source: Source) -> Iterator[Fault]:
    """Embeddings in the adapter with another number of rows than the base."""
    keys, base = source.once(adapter_keys), source.once(_modules)
    if not base.embeddings.input:
        return
    rows = source.known_base.tensors[base.embeddings.input].shape[0]
    resized = [
        name
        for name, tensor in keys.whole.items()
        if _leaf(name.rpartition(".")[0]) in {_leaf(each) for each in base.vocabulary}
        and len(tensor.shape) == 2
        and tensor.shape[0] not in (0, rows)
    ]
    if resized:
        count, names = keys.whole[resized[0]].shape[0], [keys.keys[name] for name in resized]
        why = "the vocabulary grew: peft fails with 'size mismatch' unless the base is resized"
        fix = "resize the base before peft loads it, or merge it with Plumbline"
        text = f"{rows} rows, as the base has"
        yield Fault(f"{count} rows", text, "", names, WARNING, why, fix)


def _leaf(module: str) -> str:
    return plain_module(module).rpartition(".")[2]


@check(
    "ADAPTER_PARTS_TIE", WARNING, needs=(fits_base,),
    why="after a merge the two differ; if they stay tied, the model repeats a token",
    fix="merge it with Plumbline, which unties them: {merge}",
    issues="transformers #45127",
)  # fmt: skip
def parted_tie(source: Source) -> Iterator[Fault]:
    """An adapter that changes one of two tied embeddings."""
    keys, base = source.once(adapter_keys), source.once(_modules)
    leaves = {_leaf(name) for name in base.vocabulary}
    changed = {*keys.pairs, *(name.rpartition(".")[0] for name in keys.whole)}
    touched = sorted(plain_module(name) for name in changed if _leaf(name) in leaves)
    if touched and base.embeddings.tied:
        text = "changed by the adapter; the base ties both embeddings"
        yield Fault(text, "a merge that unties them, or training of both as one", tensors=touched)


@also("ADAPTER_COVERAGE", needs=(fits_base,))
def uncovered_modules(source: Source) -> Iterator[Fault]:
    """Target modules of the base without a LoRA pair, by peft's rules for names."""
    keys, base = source.once(adapter_keys), source.once(_modules)
    config = source.once(adapter_config)
    patterns: list[str] = []
    for setting in (config.exclude_modules, config.layers_pattern, config.modules_to_save):
        patterns += [setting] if isinstance(setting, str) else setting
    have = {plain_module(name) for name in keys.pairs}
    if isinstance(config.target_modules, str) or not is_cheap(*patterns):
        return
    if not source.weights.is_whole or source.once(_unknown) or not have <= set(base.modules):
        return  # the base names its modules differently in memory: names cannot be compared
    # Separate experts on disk are one parameter in transformers 5, and not modules.
    fused = not any(_is_elsewhere(name) for name in have)
    kinds = {
        name: EMBEDDING if name in base.vocabulary else LINEAR if len(shape) == 2 else OTHER
        for name, shape in base.modules.items()
        if len(shape) > 1 and not (fused and _is_elsewhere(name))
    }
    many = len(config.target_modules) > _MANY  # a list of all modules by full name
    names = config.target_modules if many else targeted_modules(config, kinds)
    wanted = [name for name in names if name in kinds]
    lacking = [name for name in wanted if name not in have]
    if lacking:
        text = f"{len(have)} of {len(have) + len(lacking)} target modules"
        fix = "save the adapter again from the training run, with all of its tensors gathered"
        yield Fault(text, "a pair for each", tensors=lacking, severity=ERROR, fix=fix)
