"""Compare a merged model with its base and adapter, value by value (values=true)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from tasks.audit.catalogue import against_base
from tasks.audit.catalogue import merge_proof as say
from tasks.audit.catalogue.entry import Entry
from tasks.audit.checks.adapters.adapter_keys import pattern_of
from tasks.audit.checks.adapters.same_bytes import differ
from tasks.audit.class_contract import perform_apart
from tasks.audit.finding import Finding
from tasks.audit.source import Source
from tasks.core.errors import PlumblineError
from tasks.weights.files.dtype_conversion import NUMPY
from tasks.weights.files.file_ranges import Reader
from tasks.weights.proof.expected import widened
from tasks.weights.proof.faults import State
from tasks.weights.proof.merge import Proof, Verdict, prove_merge
from tasks.weights.proof.planning import planned

_FAULTS: Mapping[State, Entry] = {
    State.LEFT_OUT: say.MERGE_LEFT_OUT,
    State.TWICE: say.MERGE_TWICE,
    State.SCALED: say.MERGE_SCALE,
    State.TRANSPOSED: say.MERGE_TRANSPOSED,
    State.EXPERT: say.MERGE_EXPERTS,
    State.CHANGED: say.MERGE_CHANGED,
    State.MISSING: say.MERGE_MISSING,
}
_OTHER_BASE = 0.5
"""Share of untouched tensors that differ, above which the base is another one."""
_FEW = 2
_ROWS = 16
_ALIKE, _UNLIKE = 0.9, 0.5
"""Cosine similarity of a matrix with the base's: above the first it is the same matrix, below the
second a different one."""


def check(source: Source) -> Iterator[Finding]:
    """Prove the merge if an adapter is given; else look for layers that were not merged."""
    base = source.base
    if not (source.values and source.is_model and base is not None and base.is_model):
        return
    if source.adapter is None:
        yield from _partial(source, base)
        return
    try:
        made = planned(base.folder.root, source.adapter, perform=perform_apart)
        proof = prove_merge(made.plan, made.sources, source, any_base=True, tied=made.tied)
    except PlumblineError as error:
        yield say.MERGE_NOT_PROVEN.at(
            "", found=error.message, expected="a base and an adapter that fit each other"
        )
        return
    yield from _findings(source, proof)


def _findings(source: Source, proof: Proof) -> Iterator[Finding]:
    untouched = [one for one in proof.verdicts if not one.touched]
    changed = [one for one in untouched if one.state is State.CHANGED]
    if len(changed) > max(_FEW, _OTHER_BASE * len(untouched)):
        yield against_base.WRONG_BASE.at(
            "", _names(changed), expected="the base's, bit for bit",
            found=f"{len(changed)} of {len(untouched)} tensors that the adapter does not touch are "
            "others",
        )  # fmt: skip
        return
    for state, entry in _FAULTS.items():
        wrong = [one for one in proof.of(state) if one not in changed]
        if wrong:
            yield entry.at(
                _file(source, wrong), _names(wrong), found=_found(wrong, proof),
                expected=_EXPECTED.get(state, "base + scale * B A"),
            )  # fmt: skip
    if changed:
        yield say.MERGE_UNTOUCHED.at(
            _file(source, changed), _names(changed), expected="the base's",
            found=f"{len(changed)} of {len(untouched)} tensors",
        )  # fmt: skip
    if proof.drifts and not proof.faults:
        yield say.MERGE_SCALE.at(
            "", found=f"{proof.scale:.4f} times the change, over all tensors", expected="once"
        )
    yield from _base_of(proof)
    left = proof.of(State.NOT_COMPARED)
    if left:
        yield say.MERGE_NOT_PROVEN.at(
            _file(source, left), _names(left), found=f"{len(left)} tensors: {left[0].note}",
            expected="tensors that can be compared",
        )  # fmt: skip
    elif proof.ok:
        touched = sum(one.touched for one in proof.verdicts)
        yield say.MERGE_PROVEN.at(
            "", found=f"{touched} tensors are the base's plus the adapter's, "
            f"{len(proof.verdicts) - touched} the base's", expected="that",
        )  # fmt: skip


_EXPECTED = {
    State.EXPERT: "the order of the base",
    State.TRANSPOSED: "as the base has it",
    State.MISSING: "there",
}


def _found(wrong: Collection[Verdict], proof: Proof) -> str:
    first, count = next(iter(wrong)), len(wrong)
    touched = sum(one.touched for one in proof.verdicts)
    if first.state is State.SCALED:
        scales = sorted({round(one.scale, 3) for one in wrong})
        told = f"{scales[0]}" if len(scales) == 1 else f"{scales[0]} to {scales[-1]}"
        return f"{told} times the change, in {count} of {touched} tensors"
    if first.state is State.EXPERT:
        return f"{count} tensors; {first.name} is that of {first.like}"
    if first.state in (State.LEFT_OUT, State.TWICE):
        return f"{count} of {touched} tensors that the adapter changes"
    beyond = first.sums.beyond if first.sums is not None else 0
    elements = first.sums.elements if first.sums is not None else 0
    more = f"; of the first {beyond} of {elements} elements are off" if beyond else ""
    return f"{count} tensors{more}"


def _base_of(proof: Proof) -> Iterator[Finding]:
    """Report a merge into the base that was quantized to 4 bits and dequantized."""
    packed = [one for one in proof.dequantized if one.touched]
    plain = [
        one
        for one in proof.verdicts
        if one.touched and not one.dequantized and one.state is State.RIGHT and _is_matrix(one)
    ]
    if not packed:
        return
    if plain:
        yield say.MERGE_MIXED_BASE.at(
            "", _names(plain), found=f"{len(packed)} dequantised, {len(plain)} original",
            expected="one base for all",
        )  # fmt: skip
        return
    yield say.MERGE_DEQUANTIZED.at(
        "", found=f"{len(packed)} tensors: the base's through NF4 and back, plus the change",
        expected="a QLoRA adapter",
    )  # fmt: skip


def _is_matrix(one: Verdict) -> bool:
    return one.name.endswith("_proj.weight")


def _names(verdicts: Collection[Verdict]) -> list[str]:
    return [one.name for one in verdicts]


def _file(source: Source, verdicts: Collection[Verdict]) -> str:
    name = next(iter(verdicts)).name.partition("[")[0]
    return source.tensors[name].file if name in source.tensors else ""


def _partial(source: Source, base: Source) -> Iterator[Finding]:
    """Report kinds of matrices of which some equal the base's and others do not."""
    kinds: dict[str, dict[bool, list[str]]] = defaultdict(lambda: defaultdict(list))
    for key, held in source.tensors.items():
        other = base.tensors.get(key)
        alike = other is not None and (held.shape, held.dtype) == (other.shape, other.dtype)
        if alike and len(held.shape) == 2 and pattern_of(key) != key:
            kinds[pattern_of(key)][not _same(source, base, key)].append(key)
    mixed = {kind: one for kind, one in kinds.items() if one[True] and one[False]}
    if mixed:
        same = [key for one in mixed.values() for key in one[False]]
        total = sum(len(one[True]) + len(one[False]) for one in mixed.values())
        yield say.MERGE_PARTIAL.at(
            _file_of(source, same), same, expected="all changed, or none",
            found=f"{len(same)} of {total} tensors are the base's",
        )  # fmt: skip
    yield from _turned(source, base, [key for one in kinds.values() for key in one[True]])


def _same(source: Source, base: Source, key: str) -> bool:
    return not differ((source, key), (base, key))


def _file_of(source: Source, keys: list[str]) -> str:
    return source.tensors[keys[0]].file


def _turned(source: Source, base: Source, keys: list[str]) -> Iterator[Finding]:
    """Report square matrices that match the base's only after a transpose."""
    square = [key for key in keys if len({*source.tensors[key].shape}) == 1]
    turned = [key for key in square if _is_turned(source, base, key)]
    if turned:
        yield say.MERGE_TRANSPOSED.at(
            _file_of(source, turned), turned, found=f"{len(turned)} tensors are like the base's, "
            "transposed", expected="as the base has it",
        )  # fmt: skip


def _is_turned(source: Source, base: Source, key: str) -> bool:
    held, other = source.tensors[key], base.tensors[key]
    size = held.shape[0]
    if held.dtype not in NUMPY or size < _ROWS:
        return False
    ours = _first(source, key, _ROWS)
    if _cosine(ours, _first(base, key, _ROWS)) > _UNLIKE:
        return False
    whole = _first(base, key, other.shape[0])
    return _cosine(ours, whole[:, :_ROWS].T) > _ALIKE


def _first(source: Source, key: str, rows: int) -> NDArray[np.float32]:
    """Return the first rows of a matrix in fp32."""
    info = source.tensors[key]
    raw: NDArray[np.uint8] = np.empty(info.nbytes // info.shape[0] * rows, np.uint8)
    with Reader(source.extents(key)) as reader:
        reader.into(raw, 0)
    return widened(raw, info.dtype).reshape(rows, -1)


def _cosine(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    norms = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    return float(np.vdot(one, other)) / norms if norms else 0.0
