"""How packed matrices are decoded, said in the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tasks.weights.files.source import Source
from tasks.weights.plan.operations import Op, Plan
from tasks.weights.quantized.packed import STORED
from tasks.weights.quantized.source import PackedCheckpoint


def decoding(plan: Plan, sources: Mapping[str, Source]) -> Plan:
    """The same plan; what starts from a packed matrix decodes it.

    The 4 bits that training held the base in are these very bits: nothing else is quantised, and
    there is no original to compare with.

    Args:
        plan: made from the tensors that `sources` show.
        sources: inputs by name; all but packed ones are left alone.
    """
    ops = tuple(_decoding(op, sources.get(op.input)) for op in plan.ops)
    return replace(plan, ops=ops)


def packing(source: Source, key: str) -> dict[str, Any] | None:
    """`Op.quantization` of an operation that starts from this tensor; None for a plain one."""
    if not isinstance(source, PackedCheckpoint) or key not in source.packed:
        return None
    stored = {**source.packed[key].as_json(), "turned": key in source.turned}
    return {STORED: stored}


def _decoding(op: Op, source: Source | None) -> Op:
    found = packing(source, op.key) if source is not None else None
    return op if found is None else replace(op, quantization=found)
