"""Whether a plan can be executed: everything that headers tell, all findings in one error.

    validate(plan, {"base": base, "adapter": adapter})

After this no shape, dtype or key can fail while tensors are moved; only disks can.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

from tasks.core.contract import TensorLike, describe
from tasks.core.errors import ContractError, first_and_more
from tasks.weights.execute.writer import require_space
from tasks.weights.files.dtype_bits import is_float
from tasks.weights.files.header import ITEM_BITS
from tasks.weights.files.source import Source, find
from tasks.weights.plan.adapter_ops import Term, operands
from tasks.weights.plan.coverage import coverage_findings
from tasks.weights.plan.operations import Op, Plan
from tasks.weights.plan.term_shapes import term_findings

SHOWN = 50
"""Findings that an error lists; it says how many there are."""
_SUGGESTIONS = 5
_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


def validate(plan: Plan, sources: Mapping[str, Source], *, out: Path | None = None) -> None:
    """Check a plan against its inputs, headers only.

    Args:
        plan: what is to be done.
        sources: the inputs by the names that the plan uses.
        out: where it will be written, if free space is to be checked too.

    Raises:
        ContractError: with every finding: tensors that are nowhere, of another dtype, too short,
            used twice or not at all; names planned twice; casts that are none; terms that do not
            fit; empty tensors.
        ArtifactError: nothing but space is missing.
    """
    findings = list(plan_findings(plan, sources))
    if findings:
        raise ContractError(
            f"plan does not fit its inputs: {first_and_more(findings)}",
            details=[*findings[:SHOWN], *_more(findings)],
        )
    if out is not None:
        require_space(out, plan.nbytes)


def plan_findings(plan: Plan, sources: Mapping[str, Source]) -> Iterator[str]:
    """Everything that is wrong with a plan, one line each."""
    counts = Counter(op.name for op in plan.ops)
    yield from (f"{name}: planned {n} times" for name, n in counts.items() if n > 1)
    if not plan.ops:
        yield "the plan makes no tensor"
    if plan.shards is not None and sum(plan.shards) != len(plan.ops):
        yield f"files for {sum(plan.shards)} tensors, {len(plan.ops)} are planned"
    near = _Near(sources)
    for op in plan.ops:
        yield from _op_findings(op, sources, near)
    yield from coverage_findings(plan, sources)


def _op_findings(op: Op, sources: Mapping[str, Source], near: _Near) -> Iterator[str]:
    found = find(op.source, sources)
    if isinstance(found, str):
        yield f"{op.name}: {found}{near.to(op.source)}"
        return
    if op.dtype not in ITEM_BITS:
        yield f"{op.name}: {op.dtype} is no dtype"
        return
    if op.transpose and len(op.shape) < 2:
        yield f"{op.name}: {list(op.shape)} cannot be transposed"
        return
    if not prod(op.shape):
        yield f"{op.name}: {describe(op.shape, op.dtype)} has no elements"
    if found.dtype != op.source_dtype:
        yield f"{op.name}: {op.source} is {found.dtype}, planned as {op.source_dtype}"
    elif op.quantization is None:
        yield from _extent_findings(op, found, sources[op.input])
    cast = op.dtype != op.source_dtype and op.quantization is None and op.encoding is None
    if cast and not {op.dtype, op.source_dtype} <= set(_FLOATS):
        yield f"{op.name}: {op.source_dtype} cannot be cast to {op.dtype}"
    if op.kind == "compute" and op.terms and not is_float(op.dtype):
        yield f"{op.name}: {op.dtype} is no float to compute in"
    if op.encoding is not None:
        yield from _encoding_findings(op, found)
    for term in op.terms:
        yield from (f"{op.name}: {text}" for text in _term_findings(op, term, sources, near))


def _encoding_findings(op: Op, found: TensorLike) -> Iterator[str]:
    """An encoded matrix is read whole: its scales have other shapes than its numbers."""
    assert op.encoding is not None
    columns = op.encoding.columns if op.encoding.part == "weight" else 1
    wanted = (op.shape[0] if op.shape else 0, op.encoding.columns)
    if tuple(found.shape) != wanted or op.shape != (wanted[0], columns) or op.start:
        yield f"{op.name}: 8 bits of {list(wanted)} wanted, {op.source} is {list(found.shape)}"
    if not is_float(op.source_dtype):
        yield f"{op.name}: {op.source_dtype} cannot be encoded in 8 bits"


def _extent_findings(op: Op, found: TensorLike, source: Source) -> Iterator[str]:
    held, wanted = prod(found.shape), op.start + prod(op.shape)
    if op.start < 0 or wanted > held:
        text = f"elements {op.start} to {wanted}" if op.start else describe(op.shape, op.dtype)
        yield f"{op.name}: {text} wanted, {op.source} is {describe(found.shape, found.dtype)}"
    elif op.start == 0 and wanted == held and not _same_shape(op, tuple(found.shape)):
        yield f"{op.name}: is to be {list(op.shape)}, {op.source} is {list(found.shape)}"
    nbytes = sum(one.nbytes for one in source.extents(op.key))
    if nbytes != held * ITEM_BITS[found.dtype] // 8:
        held_text = describe(found.shape, found.dtype)
        yield f"{op.source}: {held_text}, but its files hold {nbytes} bytes"


def _same_shape(op: Op, shape: tuple[int, ...]) -> bool:
    """Equal but for the asked transposition; leading axes may be split or merged (experts)."""
    wanted = (*op.shape[:-2], op.shape[-1], op.shape[-2]) if op.transpose else op.shape
    return wanted == shape or ({len(wanted), len(shape)} == {2, 3} and wanted[-1] == shape[-1])


def _term_findings(op: Op, term: Term, sources: Mapping[str, Source], near: _Near) -> Iterator[str]:
    held: dict[str, TensorLike] = {}
    for name in operands(term):
        found = find(name, sources)
        if isinstance(found, str):
            yield found + near.to(name)
        elif not is_float(found.dtype):
            yield f"{name}: {found.dtype} is no float"
        else:
            held[name] = found
    if len(held) == len(set(operands(term))):
        shapes = {name: tuple(found.shape) for name, found in held.items()}
        yield from term_findings(term, op.shape, shapes)


class _Near:
    """Which key was meant, for the first few that are missing: a search compares with all keys.

    A plan for another model misses all of 45,000, and nobody reads that many suggestions.
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources, self._left = sources, _SUGGESTIONS

    def to(self, name: str) -> str:
        """`; near: <key>`, or nothing."""
        source, _, key = name.partition(":")
        if source not in self._sources or not self._left:
            return ""
        self._left -= 1
        found = difflib.get_close_matches(key, list(self._sources[source].tensors), n=1)
        return f"; near: {found[0]}" if found else ""


def _more(findings: list[str]) -> list[str]:
    hidden = len(findings) - SHOWN
    return [f"... and {hidden} more"] if hidden > 0 else []
