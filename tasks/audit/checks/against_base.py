"""A merged model, or an adapter, against the base that it is said to come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tasks.audit.catalogue import against_base as say
from tasks.audit.checks.adapters.adapter_keys import tail_of
from tasks.audit.checks.adapters.same_bytes import first_difference
from tasks.audit.checks.text.embeddings import embeddings_of
from tasks.audit.config_fields import of_text, text_config
from tasks.audit.finding import Finding
from tasks.audit.recognise import ADAPTER_CONFIG, CONFIG
from tasks.audit.source import Source
from tasks.weights.files.identity import base_mismatch
from tasks.weights.quantized.config_fields import stored

_SIZES = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "head_dim", "num_local_experts", "num_experts", "n_routed_experts",
)  # fmt: skip
"""What no training changes. The vocabulary may grow."""
_MOST = 3
_HUB = 3
"""Parts of a path: a hub's cache has models--Qwen--Qwen3-8B/snapshots/<commit>."""


def check(source: Source) -> Iterator[Finding]:
    """By what the two say; by their tensors; with `values`, by the bytes."""
    base = source.base
    if base is None or not base.is_model:
        return
    if source.is_adapter:
        reason = _other_base(source, base)
        if reason:
            expected = "the base that the adapter was trained on"
            yield say.WRONG_BASE.at(ADAPTER_CONFIG, found=reason, expected=expected)
        else:
            yield from _name(source, base)
    if not source.is_model:
        return
    wrong = list(_sizes(source.config(), base.config()))
    if wrong:
        yield say.WRONG_BASE.at(
            CONFIG, found="; ".join(wrong[:_MOST]), expected="sizes that training does not change"
        )
        return
    yield from _shapes(source, base)
    yield from _lost(source, base)
    if source.values and base.values:
        yield from _equal(source, base)


def _other_base(source: Source, base: Source) -> str:
    """Why the base is another model than training recorded, as a delivery decides it."""
    name = source.config(ADAPTER_CONFIG).get("base_model_name_or_path")
    inputs = (source.recognised.manifest or {}).get("inputs")
    digest = inputs.get("base") if isinstance(inputs, Mapping) else None
    return base_mismatch(
        base.folder.root,
        digest=digest if isinstance(digest, str) else "",
        name=name if isinstance(name, str) else "",
    )


def _name(source: Source, base: Source) -> Iterator[Finding]:
    said = source.config(ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(said, str) or not said:
        return
    if base.recognised.manifest:
        return  # an artifact of ours has a digest, and lies in a folder of any name
    given = {*base.folder.root.resolve().parts[-_HUB:], str(base.config().get("_name_or_path", ""))}
    given = {
        one.rpartition("--")[2] for one in given
    } | given  # the hub's cache: models--<of>--<it>
    names = {one.rstrip("/").rpartition("/")[2].lower() for one in given if one}
    if said.rstrip("/").rpartition("/")[2].lower() not in names:
        yield say.BASE_NAME.at(
            ADAPTER_CONFIG, found=f"{said}; given {base.folder.root.name}", expected="the same name"
        )


def _sizes(config: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[str]:
    for name in _SIZES:
        pick = text_config if name == "model_type" else None
        ours = pick(config).get(name) if pick else of_text(config, name)
        theirs = pick(base).get(name) if pick else of_text(base, name)
        if ours is not None and theirs is not None and ours != theirs:
            yield f"{name} {ours!r}, the base has {theirs!r}"


def _shapes(source: Source, base: Source) -> Iterator[Finding]:
    if stored(source.config()) != stored(base.config()):
        return
    grown = {*_embeddings(source), *_embeddings(base)}
    wrong = [
        key
        for key, held in source.tensors.items()
        if key in base.tensors and held.shape != base.tensors[key].shape
        and key not in grown and 0 not in held.shape
    ]  # fmt: skip
    if wrong:
        ours, theirs = source.tensors[wrong[0]].shape, base.tensors[wrong[0]].shape
        yield say.WRONG_BASE.at(
            source.tensors[wrong[0]].file, wrong, found=f"{list(ours)}",
            expected=f"{list(theirs)}, as the base has",
        )  # fmt: skip


def _embeddings(source: Source) -> tuple[str, str]:
    found = embeddings_of(source.tensors, source.config())
    return found.input, found.output


def _lost(source: Source, base: Source) -> Iterator[Finding]:
    """Tensors of the base that are gone, but for heads that are tied or replaced."""
    if not (source.weights.is_whole and base.weights.is_whole) or stored(base.config()):
        return
    replaced = {_embeddings(base)[1]}
    there = {tail_of(key) for key in source.tensors}
    lost = [
        key
        for key in base.tensors
        if key not in source.tensors and tail_of(key) not in there and key not in replaced
        and not _is_expert(key)
    ]  # fmt: skip
    if lost:
        yield say.BASE_TENSORS_LOST.at(
            "", lost, found=f"{len(lost)} of {len(base.tensors)} tensors are not there",
            expected="every tensor of the base",
        )  # fmt: skip


def _is_expert(key: str) -> bool:
    """Experts may lie there in another layout: a family of their own looks at them."""
    return ".experts." in key


def _equal(source: Source, base: Source) -> Iterator[Finding]:
    both = [key for key, held in source.tensors.items() if _alike(key, held, base)]
    if not both or len(both) < len(source.tensors):
        return
    if first_difference(source, base, both) is None:
        yield say.MERGED_EQUALS_BASE.at(
            "", found=f"all of {len(both)} tensors are the base's, bit for bit",
            expected="a model that training changed",
        )  # fmt: skip


def _alike(key: str, held: Any, base: Source) -> bool:
    other = base.tensors.get(key)
    return other is not None and (held.shape, held.dtype) == (other.shape, other.dtype)
