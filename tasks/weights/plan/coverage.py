"""Whether a plan uses every input tensor: once, and whole; or drops it for a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import prod

from tasks.core.contract import describe
from tasks.weights.files.source import Source, find
from tasks.weights.plan.adapter_ops import operands
from tasks.weights.plan.operations import Plan


def coverage_findings(plan: Plan, sources: Mapping[str, Source]) -> Iterator[str]:
    """Every input tensor is used, once, and whole; or it is dropped for a reason."""
    used: dict[str, list[tuple[int, int, str]]] = {}
    untied = set(plan.notes.get("untied", ()))
    for op in sorted(plan.ops, key=lambda op: op.name in untied):
        if op.name in untied and op.source in used:
            continue  # two names of one tensor that are stored apart from now on
        if op.encoding is None or op.encoding.part == "weight":  # scales are of the same numbers
            used.setdefault(op.source, []).append((op.start, op.start + prod(op.shape), op.name))
    asked = {name for op in plan.ops for term in op.terms for name in operands(term)}
    dropped = Counter(entry.source for entry in plan.dropped)
    for name, count in dropped.items():
        if isinstance(find(name, sources), str):
            yield f"{name}: to be dropped, and is not there"
        elif count > 1 or name in used or name in asked:
            yield f"{name}: to be dropped, and used or dropped elsewhere too"
    packed = {op.source for op in plan.ops if op.quantization is not None}
    for input_name, source in sources.items():
        for key, info in source.tensors.items():
            name = f"{input_name}:{key}"
            if name in used and name not in packed:
                yield from _part_findings(name, prod(info.shape), used[name])
            elif name not in used and name not in asked and name not in dropped:
                yield f"{name}: {describe(info.shape, info.dtype)} is used by nothing"


def _part_findings(name: str, numel: int, parts: Iterable[tuple[int, int, str]]) -> Iterator[str]:
    at, last = 0, ""
    for first, end, op in sorted(parts):
        if first > at:
            yield f"{name}: elements {at} to {first} go nowhere"
        elif first < at:
            yield f"{name}: goes to {last} and to {op}"
        at, last = max(at, end), op
    if at < numel:
        yield f"{name}: elements {at} to {numel} go nowhere"
