"""Compare a merged model or an adapter with the base that it should come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.audit.catalogue.values import AgainstBase
from tasks.audit.checks.adapters.adapter_keys import tail_of
from tasks.audit.checks.adapters.same_bytes import first_difference, same_header
from tasks.audit.checks.text.embeddings import embeddings_of
from tasks.audit.config_fields import of_text, text_config
from tasks.audit.finding import Finding
from tasks.audit.recognise import ADAPTER_CONFIG, CONFIG
from tasks.audit.source import Source
from tasks.weights.files.dtype_bits import is_float
from tasks.weights.files.dtype_conversion import widened
from tasks.weights.files.file_ranges import Reader
from tasks.weights.files.identity import base_mismatch
from tasks.weights.quantized.config_fields import stored

_SIZES = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "head_dim", "num_local_experts", "num_experts", "n_routed_experts",
)  # fmt: skip
"""Settings that training does not change. The vocabulary may grow."""
_MOST = 3
_LEAST, _COSINE = 0.5, 0.5
"""Least ratio of norms, and least cosine, of a trained model to its base. Other models of the same
shape have a cosine near 0."""
_BLOCK, _BLOCKS = 1 << 19, 4
"""Elements to read at a time, and the most blocks of a tensor, evenly spread."""
_HUB = 3
"""Last parts of a path to compare: hub caches use models--Qwen--Qwen3-8B/snapshots/<commit>."""


def check(source: Source) -> Iterator[Finding]:
    """Compare names and sizes, then tensor names and shapes, then data with `values`."""
    base = source.base
    if base is None:
        return
    if not base.is_model:
        yield AgainstBase.WRONG_BASE.at(
            str(base.folder.root), found=f"{base.recognised.what}; nothing was compared with it",
            expected="a full model", fix="base=<folder of the full model that it was made from>",
        )  # fmt: skip
        return
    if source.is_adapter:
        reason = _other_base(source, base)
        if reason:
            expected = "the base that the adapter was trained on"
            yield AgainstBase.WRONG_BASE.at(ADAPTER_CONFIG, found=reason, expected=expected)
        else:
            yield from _name(source, base)
    if not source.is_model:
        return
    wrong = list(_sizes(source.config(), base.config()))
    if wrong:
        yield AgainstBase.WRONG_BASE.at(
            CONFIG, found="; ".join(wrong[:_MOST]), expected="sizes that training does not change"
        )
        return
    yield from _shapes(source, base)
    yield from _lost(source, base)
    if source.values and base.values:
        yield from _equal(source, base)
        if source.adapter is None:  # else every element is compared with base plus adapter
            yield from compare_values(source, base)


def _other_base(source: Source, base: Source) -> str:
    """Return why the base is not the one that training recorded, by the rules of a delivery."""
    name = source.config(ADAPTER_CONFIG).get("base_model_name_or_path")
    inputs = (source.recognised.manifest or {}).get("inputs")
    digest = inputs.get("base") if isinstance(inputs, Mapping) else None
    return base_mismatch(
        base.folder.root,
        digest=digest if isinstance(digest, str) else "",
        name=name if isinstance(name, str) else "",
    )


def _name(source: Source, base: Source) -> Iterator[Finding]:
    recorded = source.config(ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(recorded, str) or not recorded:
        return
    if base.recognised.manifest:
        return  # a Plumbline artifact is identified by its digest, its folder has any name
    names = {*base.folder.root.resolve().parts[-_HUB:], str(base.config().get("_name_or_path", ""))}
    names |= {name.rpartition("--")[2] for name in names}  # hub caches: models--<owner>--<name>
    known = {name.rstrip("/").rpartition("/")[2].lower() for name in names if name}
    if recorded.rstrip("/").rpartition("/")[2].lower() not in known:
        yield AgainstBase.BASE_NAME.at(
            ADAPTER_CONFIG,
            found=f"{recorded}; base is {base.folder.root.name}",
            expected="the same name",
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
        for key, tensor in source.tensors.items()
        if key in base.tensors and tensor.shape != base.tensors[key].shape
        and key not in grown and 0 not in tensor.shape
    ]  # fmt: skip
    if wrong:
        ours, theirs = source.tensors[wrong[0]].shape, base.tensors[wrong[0]].shape
        yield from AgainstBase.WRONG_BASE.of(
            source, wrong, found=f"{list(ours)}", expected=f"{list(theirs)}, as the base has"
        )


def _embeddings(source: Source) -> tuple[str, str]:
    embeddings = embeddings_of(source.tensors, source.config())
    return embeddings.input, embeddings.output


def _lost(source: Source, base: Source) -> Iterator[Finding]:
    """Report missing tensors of the base, except heads that are tied or replaced."""
    if not (source.weights.is_whole and base.weights.is_whole) or stored(base.config()):
        return
    replaced = {_embeddings(base)[1]}
    there = {tail_of(key) for key in source.tensors}
    lost = [
        key
        for key in base.tensors
        if key not in source.tensors and tail_of(key) not in there and key not in replaced
        and ".experts." not in key  # another check handles their layouts
    ]  # fmt: skip
    if lost:
        yield AgainstBase.BASE_TENSORS_LOST.at(
            "", lost, found=f"{len(lost)} of {len(base.tensors)} tensors are missing",
            expected="every tensor of the base",
        )  # fmt: skip


def _equal(source: Source, base: Source) -> Iterator[Finding]:
    both = [key for key in source.tensors if same_header(key, source, base)]
    if not both or len(both) < len(source.tensors):
        return
    if first_difference(source, base, both) is None:
        yield AgainstBase.MERGED_EQUALS_BASE.at(
            "", found=f"all {len(both)} tensors equal the base's, bit for bit",
            expected="a model that training changed",
        )  # fmt: skip


def compare_values(source: Source, base: Source) -> Iterator[Finding]:
    """Compare norms and directions of the matrices that both have; heads may be trained anew."""
    ratios: dict[str, float] = {}
    cosines: list[float] = []
    for key, tensor in source.tensors.items():
        other = base.tensors.get(key)
        if (
            other is None or tensor.shape != other.shape or len(tensor.shape) < 2
            or not (is_float(tensor.dtype) and is_float(other.dtype))
            or tensor.start < 0 or other.start < 0 or key.startswith(("score.", "classifier."))
        ):  # fmt: skip
            continue
        products = _products(source, base, key)
        if not np.isfinite(products).all() or not (products[0] and products[2]):
            continue  # reported by `values`; a matrix that begins at zero has no counterpart
        ratios[key] = float(np.sqrt(products[0] / products[2]))
        cosines.append(float(products[1] / np.sqrt(products[0] * products[2])))
    wrong = [key for key, ratio in ratios.items() if not _LEAST <= ratio <= 1 / _LEAST]
    cosine = float(np.median(cosines)) if cosines else 1.0
    if cosine < _COSINE:
        yield AgainstBase.WRONG_BASE.at(
            "", found=f"cosine {cosine:.2f} to the base's matrices (median)",
            expected=f"at least {_COSINE}: training turns them little",
        )  # fmt: skip
    elif wrong:
        worst = max(wrong, key=lambda key: abs(np.log(ratios[key])))
        yield from AgainstBase.NORM_DIFFERS.of(
            source, wrong, expected=f"{_LEAST} to {1 / _LEAST:g}",
            found=f"{len(wrong)} of {len(ratios)} matrices; {worst}: norm {ratios[worst]:.3g} "
            "times the base's",
        )  # fmt: skip


def _products(source: Source, base: Source, key: str) -> NDArray[np.float64]:
    """Return the sums of a*a, a*b, b*b over blocks of a tensor and its counterpart, shape (3,)."""
    ours, theirs = source.tensors[key], base.tensors[key]
    sums = np.zeros(3)
    with Reader(source.extents(key)) as left, Reader(base.extents(key)) as right:
        starts = range(0, ours.numel, _BLOCK)
        for at in starts[:: -(-len(starts) // _BLOCKS)]:
            count = min(_BLOCK, ours.numel - at)
            x, y = (
                widened(reader.read(at * size, count * size), tensor.dtype)
                for reader, tensor, size in (
                    (left, ours, ours.nbytes // ours.numel),
                    (right, theirs, theirs.nbytes // theirs.numel),
                )
            )  # fmt: skip
            sums += np.dot(x, x), np.dot(x, y), np.dot(y, y)
    return sums
