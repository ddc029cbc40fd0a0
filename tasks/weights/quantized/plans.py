"""Make a plan decode the packed matrices of its sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tasks.weights.files.source import Source
from tasks.weights.plan.operations import Op, Plan
from tasks.weights.quantized.packed import STORED
from tasks.weights.quantized.source import PackedCheckpoint


def decoding(plan: Plan, sources: Mapping[str, Source]) -> Plan:
    """Return the same plan, in which operations on packed matrices decode them.

    The stored 4 bits are those that training used, so nothing else is quantized, and there is no
    original to compare with.

    Args:
        plan: a plan made from the tensors that `sources` show.
        sources: inputs by name; only packed ones matter.
    """
    ops = tuple(_decoding(op, sources.get(op.input)) for op in plan.ops)
    return replace(plan, ops=ops)


def packing(source: Source, key: str) -> dict[str, Any] | None:
    """Return `Op.quantization` for operations on this tensor; None for a plain tensor."""
    if not isinstance(source, PackedCheckpoint) or key not in source.packed:
        return None
    stored = {**source.packed[key].as_json(), "turned": key in source.turned}
    return {STORED: stored}


def _decoding(op: Op, source: Source | None) -> Op:
    quantization = packing(source, op.key) if source is not None else None
    return op if quantization is None else replace(op, quantization=quantization)
