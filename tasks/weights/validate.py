"""Check a plan against its inputs, from headers alone, and report all findings in one error.

    validate(plan, {"base": base, "adapter": adapter})

After this no key or dtype can fail during execution; only disks can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import prod

from tasks.core.contract import describe
from tasks.core.errors import ContractError, first_and_more
from tasks.weights.files.dtypes import ITEM_BITS, is_float
from tasks.weights.files.tensors import Sources, Tensor, find
from tasks.weights.plan import Op, Plan, operands

_SHOWN = 50
_FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}


def validate(plan: Plan, sources: Sources) -> None:
    """Check a plan against its inputs by the names that the plan uses, headers only.

    Raises:
        ContractError: lists every finding: input tensors that are missing, of another dtype, too
            short, used twice or unused; output names planned twice; casts between dtypes that
            cannot be cast; empty tensors.
    """
    if findings := list(plan_findings(plan, sources)):
        raise ContractError(
            f"plan does not fit its inputs: {first_and_more(findings)}", details=findings[:_SHOWN]
        )


def plan_findings(plan: Plan, sources: Sources) -> Iterator[str]:
    """Yield everything that is wrong with a plan, one line each."""
    counts = Counter(op.name for op in plan.ops)
    yield from (f"{name}: planned {n} times" for name, n in counts.items() if n > 1)
    if not plan.ops:
        yield "the plan has no operations"
    if plan.shards is not None and sum(plan.shards) != len(plan.ops):
        yield f"shards are for {sum(plan.shards)} tensors, but the plan has {len(plan.ops)}"
    for op in plan.ops:
        yield from (f"{op.name}: {text}" for text in _op_findings(op, sources))
    yield from _coverage_findings(plan, sources)


def _coverage_findings(plan: Plan, sources: Sources) -> Iterator[str]:
    """Check that every input tensor is used once and in full, or dropped for a reason."""
    used: dict[str, list[tuple[int, int, str]]] = {}
    shared = {*plan.untied, *plan.copied}
    for op in sorted(plan.ops, key=lambda op: op.name in shared):
        if op.name in shared and op.source in used:
            continue  # a tied tensor, or one that was, is read for both of its names
        if op.encoding is None or op.encoding.part == "weight":  # scales have the same source
            used.setdefault(op.source, []).append((op.start, op.start + prod(op.shape), op.name))
    used_by_terms = {name for op in plan.ops for term in op.terms for name in operands(term)}
    for name in plan.dropped:
        if isinstance(find(name, sources), str):
            yield f"{name}: to be dropped, but it is in no input"
        elif name in used or name in used_by_terms:
            yield f"{name}: to be dropped, but also used"
    for input_name, source in sources.items():
        for key, info in source.items():
            name = f"{input_name}:{key}"
            if name in used:
                yield from _part_findings(name, prod(info.shape), used[name])
            elif name not in used_by_terms and name not in plan.dropped:
                yield f"{name}: {describe(info.shape, info.dtype)} is used by nothing"


def _part_findings(name: str, numel: int, parts: Iterable[tuple[int, int, str]]) -> Iterator[str]:
    at, last = 0, ""
    for first, end, op in sorted(parts):
        if first > at:
            yield f"{name}: elements {at} to {first} are used by nothing"
        elif first < at:
            yield f"{name}: is used by {last} and by {op}"
        at, last = max(at, end), op
    if at < numel:
        yield f"{name}: elements {at} to {numel} are used by nothing"


def _op_findings(op: Op, sources: Sources) -> Iterator[str]:
    """Yield what is wrong with one operation; planners have compared the shapes of its terms."""
    for name in (name for term in op.terms for name in operands(term)):
        operand = find(name, sources)
        if isinstance(operand, str):
            yield operand
        elif not is_float(operand.dtype):
            yield f"{name}: {operand.dtype} is not a float dtype"
    tensor = find(op.source, sources)
    if isinstance(tensor, str):
        yield tensor
        return
    if op.dtype not in ITEM_BITS:
        yield f"unknown dtype {op.dtype}"
        return
    if op.transpose and len(op.shape) < 2:
        yield f"{list(op.shape)} cannot be transposed"
        return
    if not prod(op.shape):
        yield f"{describe(op.shape, op.dtype)} has no elements"
    if tensor.dtype != op.source_dtype:
        yield f"{op.source} is {tensor.dtype}, planned as {op.source_dtype}"
    else:
        yield from _extent_findings(op, tensor)
    cast = op.dtype != op.source_dtype and op.encoding is None
    if cast and not {op.dtype, op.source_dtype} <= _FLOATS:
        yield f"{op.source_dtype} cannot be cast to {op.dtype}"
    if op.terms and not is_float(op.dtype):
        yield f"{op.dtype} is not a float dtype, so nothing can be added to it"


def _extent_findings(op: Op, tensor: Tensor) -> Iterator[str]:
    size, wanted = prod(tensor.shape), op.start + prod(op.read_shape)
    stored = describe(tensor.shape, tensor.dtype)
    if op.start < 0 or wanted > size:
        text = f"elements {op.start} to {wanted}" if op.start else describe(op.shape, op.dtype)
        yield f"needs {text}, {op.source} is {stored}"
    elif op.start == 0 and wanted == size:
        read = op.read_shape
        read = (*read[:-2], read[-1], read[-2]) if op.transpose else read
        # A leading axis may be split or merged.
        split = {len(read), len(tensor.shape)} == {2, 3} and read[-1] == tensor.shape[-1]
        if read != tuple(tensor.shape) and not split:
            yield f"must be {list(op.shape)}, {op.source} is {list(tensor.shape)}"
    # The files of a packed matrix hold 4 bits for an element, and scales.
    if op.packed is None and tensor.nbytes != size * ITEM_BITS[tensor.dtype] // 8:
        yield f"{op.source}: {stored}, but its files hold {tensor.nbytes} bytes"
