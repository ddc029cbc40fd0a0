"""A PEFT adapter against the base that it is given with: coverage, sizes, vocabulary, ties."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tasks.audit.base_modules import Base, read_base
from tasks.audit.catalogue import adapter as say
from tasks.audit.catalogue import configuration
from tasks.audit.checks.adapters.adapter_keys import AdapterKeys, Pair, plain_module, sort_keys
from tasks.audit.checks.adapters.adapter_tensors import is_tame, outsized
from tasks.audit.checks.text.embeddings import Embeddings
from tasks.audit.config_fields import is_multimodal, text_config
from tasks.audit.finding import Finding
from tasks.audit.recognise import ADAPTER_CONFIG
from tasks.audit.source import Source
from tasks.weights.adapters.config import AdapterConfig, parse_config
from tasks.weights.adapters.live import EMBEDDING, LINEAR, OTHER, LiveModel
from tasks.weights.adapters.targets import targeted_modules
from tasks.weights.quantized.config_fields import is_packed, stored

_ELSEWHERE = ("expert", "moe", "router", ".gate.")
"""Parts of modules that transformers 5 names and fuses in memory in another way than on disk."""
_TEXT, _WRAPPED = "model.layers.", re.compile(r"(model\.)?language_model\..*\.\d+\.")
_TEXT_NAMES_TAKEN = ("ministral3", "mistral")
"""Text models whose names vLLM maps into the multimodal one (its `mistral3.py`)."""
_WIDTH = 8
_MANY = 200


def check(source: Source) -> Iterator[Finding]:
    """Everything that takes both to see."""
    if not source.is_adapter or source.base is None or not source.base.is_model:
        return
    raw = source.config(ADAPTER_CONFIG)
    yield from _packed(source, source.base)
    if raw.get("peft_type") != "LORA" or outsized(raw):
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
        held = keys.pairs[unknown[0]].held
        yield say.ADAPTER_NO_MODULE.at(
            held.file if held else "", unknown, found=f"{len(unknown)} of {len(keys.pairs)} pairs",
            expected="modules of the base",
        )  # fmt: skip
    yield from _text_names(keys, source.base)
    yield from _shapes(keys, base)
    yield from _vocabulary(keys, base, source.base)
    yield from _ties(keys, base)
    if source.weights.is_whole and not unknown:
        yield from _coverage(keys, config, base)


def _packed(source: Source, base: Source) -> Iterator[Finding]:
    name = source.config(ADAPTER_CONFIG).get("base_model_name_or_path")
    if is_packed(base.config()):
        yield say.QLORA_BASE.at(
            ADAPTER_CONFIG, found=f"a base of {stored(base.config())}", expected="a merge into the "
            "dequantised base",
        )  # fmt: skip
    elif isinstance(name, str) and name.lower().rstrip("/").endswith(("-bnb-4bit", "-4bit")):
        yield say.QLORA_BASE.at(
            ADAPTER_CONFIG, found=f"trained on {name}, given a base in 16 bits",
            expected="the base that it was trained on, dequantised",
        )  # fmt: skip


def _text_names(keys: AdapterKeys, base: Source) -> Iterator[Finding]:
    """Modules named as in the text model alone, which on disk lies within a multimodal one."""
    config = base.config()
    if not is_multimodal(config) or text_config(config).get("model_type") in _TEXT_NAMES_TAKEN:
        return
    wrapped = [key for key in base.tensors if _WRAPPED.match(key)]
    names = [name for name in keys.pairs if name.startswith(_TEXT)]
    if names and wrapped and not any(key.startswith(_TEXT) for key in base.tensors):
        entry = keys.pairs[names[0]].held
        yield configuration.ADAPTER_TEXT_NAMES.at(
            entry.file if entry else "", names, found=f"{names[0]}",
            expected=f"names of the multimodal model, as {wrapped[0].rpartition('.')[0]}",
        )  # fmt: skip


def _is_elsewhere(module: str) -> bool:
    return any(part in f".{module}." for part in _ELSEWHERE)


def _shapes(keys: AdapterKeys, base: Base) -> Iterator[Finding]:
    if not base.plain:
        return
    wrong: dict[str, list[str]] = {}
    file = ""
    for name, pair in keys.pairs.items():
        shape, sizes = base.shape_of(plain_module(name)), _sizes(pair)
        if shape is None or sizes is None or len(shape) != 2 or _is_elsewhere(name):
            continue
        if sizes not in (shape, shape[::-1]):  # GPT-2's layers and embeddings are stored turned
            text = f"{list(sizes)}|{list(shape)}"
            wrong.setdefault(text, []).append(name)
            file = pair.a.file if pair.a else ""
    for text, names in list(wrong.items())[:_WIDTH]:
        found, _, expected = text.partition("|")
        yield say.ADAPTER_SHAPE.at(
            file, names, found=f"a pair for {found}", expected=f"{expected}, as the base has"
        )


def _sizes(pair: Pair) -> tuple[int, int] | None:
    """(out, in) of the weight that a pair is for; None where it does not tell."""
    if pair.a is None or pair.b is None or len(pair.a.shape) != 2 or len(pair.b.shape) != 2:
        return None
    sizes = pair.b.shape[0], pair.a.shape[1]
    return None if 0 in sizes else sizes


def _vocabulary(keys: AdapterKeys, base: Base, source: Source) -> Iterator[Finding]:
    wanted = base.embeddings.input
    if not wanted:
        return
    rows = source.tensors[wanted].shape[0]
    known = {one.rpartition(".")[0].rpartition(".")[2] for one in _both(base.embeddings)}
    other = [
        name
        for name, held in keys.whole.items()
        if plain_module(name.rpartition(".")[0]).rpartition(".")[2] in known
        and len(held.shape) == 2
        and held.shape[0] not in (0, rows)
    ]
    if other:
        held = keys.whole[other[0]]
        yield say.ADAPTER_VOCABULARY.at(
            held.file, [keys.keys[one] for one in other], found=f"{held.shape[0]} rows",
            expected=f"{rows}, as the base has",
        )  # fmt: skip


def _both(embeddings: Embeddings) -> set[str]:
    """Keys of both, where the second is tied and so not there."""
    return {one for one in (embeddings.input, embeddings.output or "lm_head.weight") if one}


def _ties(keys: AdapterKeys, base: Base) -> Iterator[Finding]:
    if not base.embeddings.tied:
        return
    leaves = [one.rpartition(".")[0].rpartition(".")[2] for one in sorted(_both(base.embeddings))]
    changed = {plain_module(one) for one in keys.pairs}
    changed |= {plain_module(one.rpartition(".")[0]) for one in keys.whole}
    touched = [one for one in sorted(changed) if one.rpartition(".")[2] in leaves]
    if touched:
        yield say.ADAPTER_PARTS_TIE.at(
            "", touched, found="changed by the adapter; the base ties both embeddings",
            expected="a merge that unties them, or trains both as one",
        )  # fmt: skip


def _coverage(keys: AdapterKeys, config: AdapterConfig, base: Base) -> Iterator[Finding]:
    """Targets of the base without a pair, by peft's own rules for names."""
    given = (config.exclude_modules, config.layers_pattern, config.modules_to_save)
    patterns = [one for some in given for one in ((some,) if isinstance(some, str) else some)]
    if isinstance(config.target_modules, str) or not is_tame(*patterns):
        return
    have = {plain_module(one) for one in keys.pairs}
    if not have <= set(base.modules):
        return  # the base names its modules differently in memory: names cannot be compared
    heads = {one.rpartition(".")[0]: EMBEDDING for one in _both(base.embeddings)}
    # Experts that lie there one by one are one parameter in transformers 5, and no module at all.
    fused = not any(_is_elsewhere(one) for one in have)
    kinds = {
        name: heads.get(name, LINEAR if len(shape) == 2 else OTHER)
        for name, shape in base.modules.items()
        if len(shape) > 1 and not (fused and _is_elsewhere(name))
    }
    if len(config.target_modules) > _MANY:  # written out, module by module
        wanted = [one for one in config.target_modules if one in kinds]
    else:
        wanted = targeted_modules(config, LiveModel({}, kinds, {}))
    lacking = [one for one in wanted if one not in have]
    if lacking:
        yield say.ADAPTER_COVERAGE.at(
            "", lacking, found=f"{len(have)} of {len(have) + len(lacking)} target modules",
            expected="a pair for each",
        )  # fmt: skip
