"""Compare a merged model with its base and adapter, value by value (values=true)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from tasks.audit.catalogue.values import AgainstBase, Merges
from tasks.audit.checks.adapters.adapter_keys import pattern_of
from tasks.audit.checks.adapters.same_bytes import differ, same_header
from tasks.audit.class_contract import perform_apart
from tasks.audit.finding import Entry, Finding
from tasks.audit.source import Source
from tasks.core.errors import PlumblineError
from tasks.weights.files.dtype_conversion import NUMPY, widened
from tasks.weights.files.file_ranges import Reader
from tasks.weights.proof.faults import State
from tasks.weights.proof.merge import Proof, Verdict, prove_merge
from tasks.weights.proof.planning import planned

_FAULTS: Mapping[State, Entry] = {
    State.LEFT_OUT: Merges.MERGE_LEFT_OUT,
    State.TWICE: Merges.MERGE_TWICE,
    State.SCALED: Merges.MERGE_SCALE,
    State.TRANSPOSED: Merges.MERGE_TRANSPOSED,
    State.EXPERT: Merges.MERGE_EXPERTS,
    State.CHANGED: Merges.MERGE_CHANGED,
    State.MISSING: Merges.MERGE_MISSING,
}
_OTHER_BASE = 0.5
"""Share of untouched tensors that differ, above which the base is another one."""
_KEPT, _NAMED = 0.9, 3
"""Share of the adapter below which rounding is reported, and number of tensors that are named."""
_FEW = 2
_ROWS = 16
_SIXTEEN_BITS = ("BF16", "F16")
_SAMPLED, _LEAST, _MOST = 64, 100, 0.5
"""Rows of each matrix that are compared; least number, and largest share, of changed weights."""
_ALIKE, _UNLIKE = 0.9, 0.5
"""Cosine similarity with the base's matrix: above the first it is the same matrix, below the second
a different one."""


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
        yield Merges.MERGE_NOT_PROVEN.at(
            "", found=error.message, expected="a base and an adapter that fit each other"
        )
        return
    yield from _findings(source, proof)


def _findings(source: Source, proof: Proof) -> Iterator[Finding]:
    untouched = [verdict for verdict in proof.verdicts if not verdict.touched]
    changed = [verdict for verdict in untouched if verdict.state is State.CHANGED]
    if len(changed) > max(_FEW, _OTHER_BASE * len(untouched)):
        yield AgainstBase.WRONG_BASE.at(
            "", _names(changed), expected="the base's, bit for bit",
            found=f"{len(changed)} of {len(untouched)} tensors that the adapter does not touch "
            "differ",
        )  # fmt: skip
        return
    for state, entry in _FAULTS.items():
        wrong = [verdict for verdict in proof.of(state) if verdict not in changed]
        if wrong:
            yield entry.at(
                _file(source, wrong), _names(wrong), found=_found(wrong, proof),
                expected=_EXPECTED.get(state, "base + scale * B A"),
            )  # fmt: skip
    if changed:
        yield Merges.MERGE_UNTOUCHED.at(
            _file(source, changed), _names(changed), expected="the base's",
            found=f"{len(changed)} of {len(untouched)} tensors",
        )  # fmt: skip
    if proof.drifts and not proof.faults:
        yield Merges.MERGE_SCALE.at(
            "",
            found=f"{proof.scale:.4f} times the change, over all tensors",
            expected="the change once",
        )
    yield from _base_of(proof)
    left = proof.of(State.NOT_COMPARED)
    if left:
        yield Merges.MERGE_NOT_PROVEN.at(
            _file(source, left), _names(left), found=f"{len(left)} tensors: {left[0].note}",
            expected="tensors that can be compared",
        )  # fmt: skip
    elif proof.ok and proof.kept < _KEPT:
        worst = sorted(
            (verdict for verdict in proof.verdicts if verdict.touched and verdict.sums),
            key=lambda verdict: verdict.sums.kept_share if verdict.sums else 1.0,
        )
        yield Merges.MERGE_ROUNDED_AWAY.at(
            "", _names(worst[:_NAMED]), expected="all of it",
            found=f"{proof.kept:.0%} of what the adapter learned is in these weights",
        )  # fmt: skip
    elif proof.ok:
        touched = sum(verdict.touched for verdict in proof.verdicts)
        yield Merges.MERGE_PROVEN.at(
            "", found=f"{touched} tensors are the base's plus the adapter's, "
            f"{len(proof.verdicts) - touched} the base's", expected="exactly that",
        )  # fmt: skip


_EXPECTED = {
    State.EXPERT: "the order of the base",
    State.TRANSPOSED: "as the base has it",
    State.MISSING: "present",
}


def _found(wrong: Collection[Verdict], proof: Proof) -> str:
    first, count = next(iter(wrong)), len(wrong)
    touched = sum(verdict.touched for verdict in proof.verdicts)
    if first.state is State.SCALED:
        scales = sorted({round(verdict.scale, 3) for verdict in wrong})
        scales_text = f"{scales[0]}" if len(scales) == 1 else f"{scales[0]} to {scales[-1]}"
        return f"{scales_text} times the change, in {count} of {touched} tensors"
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
    packed = [verdict for verdict in proof.dequantized if verdict.touched]
    plain = [
        verdict
        for verdict in proof.verdicts
        if verdict.touched
        and not verdict.dequantized
        and verdict.state is State.RIGHT
        and verdict.name.endswith("_proj.weight")
    ]
    if not packed:
        return
    if plain:
        yield Merges.MERGE_MIXED_BASE.at(
            "", _names(plain), found=f"{len(packed)} dequantised, {len(plain)} original",
            expected="one base for all",
        )  # fmt: skip
        return
    yield Merges.MERGE_DEQUANTIZED.at(
        "", found=f"{len(packed)} tensors: the base's, quantised to NF4 and back, plus the change",
        expected="a QLoRA adapter",
    )  # fmt: skip


def _names(verdicts: Collection[Verdict]) -> list[str]:
    return [verdict.name for verdict in verdicts]


def _file(source: Source, verdicts: Collection[Verdict]) -> str:
    name = next(iter(verdicts)).name.partition("[")[0]
    return source.tensors[name].file if name in source.tensors else ""


def _partial(source: Source, base: Source) -> Iterator[Finding]:
    """Report kinds of matrices of which some equal the base's and others do not."""
    kinds: dict[str, dict[bool, list[str]]] = defaultdict(lambda: defaultdict(list))
    for key, tensor in source.tensors.items():
        kind = pattern_of(key)
        if same_header(key, source, base) and len(tensor.shape) == 2 and kind != key:
            kinds[kind][differ((source, key), (base, key))].append(key)
    mixed = {kind: groups for kind, groups in kinds.items() if groups[True] and groups[False]}
    same = [key for groups in mixed.values() for key in groups[False]]
    total = sum(len(groups[True]) + len(groups[False]) for groups in mixed.values())
    count = f"{len(same)} of {total} tensors are the base's"
    yield from Merges.MERGE_PARTIAL.of(source, same, found=count, expected="all changed, or none")
    changed = [key for groups in kinds.values() for key in groups[True]]
    yield from _transposed(source, base, changed)
    yield from _one_step(source, base, changed)


def _one_step(source: Source, base: Source, keys: list[str]) -> Iterator[Finding]:
    """Report weights of which few changed, and those by one step of their format."""
    elements, changed, steps = 0, 0, 0
    for key in keys:
        if source.tensors[key].dtype not in _SIXTEEN_BITS:
            continue
        ours, theirs = (_words(each, key, _SAMPLED) for each in (source, base))
        apart = np.abs(ours.astype(np.int32) - theirs)
        elements += apart.size
        changed += int(np.count_nonzero(apart))
        steps += int(np.count_nonzero(apart == 1))
    if changed > _LEAST and changed < _MOST * elements and steps > changed / 2:
        yield Merges.MERGE_ONE_STEP.at(
            "", found=f"{changed / elements:.0%} of the weights changed, {steps / changed:.0%} of "
            "those by exactly one step of their format",
            expected="most weights of a trained layer changed",
        )  # fmt: skip


def _words(source: Source, key: str, rows: int) -> NDArray[np.int16]:
    """Return the first rows of a 16-bit matrix as words."""
    info = source.tensors[key]
    count = min(rows, info.shape[0])
    raw: NDArray[np.uint8] = np.empty(info.nbytes // info.shape[0] * count, np.uint8)
    with Reader(source.extents(key)) as reader:
        reader.into(raw, 0)
    return raw.view(np.int16)


def _transposed(source: Source, base: Source, keys: list[str]) -> Iterator[Finding]:
    """Report square matrices that match the base's only after a transpose."""
    square = [key for key in keys if len({*source.tensors[key].shape}) == 1]
    transposed = [key for key in square if _is_transposed(source, base, key)]
    count = f"{len(transposed)} tensors equal the base's transposed"
    yield from Merges.MERGE_TRANSPOSED.of(
        source, transposed, found=count, expected="as the base has it"
    )


def _is_transposed(source: Source, base: Source, key: str) -> bool:
    tensor, base_tensor = source.tensors[key], base.tensors[key]
    size = tensor.shape[0]
    if tensor.dtype not in NUMPY or size < _ROWS:
        return False
    ours = _first(source, key, _ROWS)
    if _cosine(ours, _first(base, key, _ROWS)) > _UNLIKE:
        return False
    whole = _first(base, key, base_tensor.shape[0])
    return _cosine(ours, whole[:, :_ROWS].T) > _ALIKE


def _first(source: Source, key: str, rows: int) -> NDArray[np.float32]:
    """Return the first rows of a matrix in fp32."""
    info = source.tensors[key]
    raw: NDArray[np.uint8] = np.empty(info.nbytes // info.shape[0] * rows, np.uint8)
    with Reader(source.extents(key)) as reader:
        reader.into(raw, 0)
    return widened(raw, info.dtype).reshape(rows, -1)


def _cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    norms = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(np.vdot(a, b)) / norms if norms else 0.0
