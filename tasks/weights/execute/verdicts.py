"""The verdict on one written tensor, and what an execution says of itself: for whoever runs a plan.

Verdicts are on what was written, as it was written: counted while the bytes streamed by.
"""

from __future__ import annotations

from typing import Any

from tasks.core.contract import Check
from tasks.weights.execute.execute import Executed
from tasks.weights.execute.journal import Outcome
from tasks.weights.files.names import parse_peft
from tasks.weights.plan.operations import Op, Plan


def gathered(op: Op, outcome: Outcome) -> Check:
    """Of a tensor put together from slices: finite; and of a lora_B, not all zero."""
    lora = parse_peft(op.name)
    is_b = lora is not None and lora.half == "B"
    bad, zero = outcome.nonfinite, bool(outcome.all_zero)
    found = f"{bad} elements not finite" if bad else "all zero" if zero else "finite, not all zero"
    # A whole lora_B of zeros says that the adapter is as it was initialised: it does nothing.
    ok = not bad and not (is_b and zero)
    wanted = "finite, not all zero" if is_b else "finite"
    return Check(f"values of {op.name}", wanted, found, ok=ok)


def merged(op: Op, outcome: Outcome) -> Check:
    """Of a tensor of a merge: changed where an adapter changes it, and else what its input has."""
    if outcome.nonfinite:
        return finite(op.name, outcome)
    if outcome.changed is not None:
        found = f"{outcome.changed:.2%} of elements changed"
        return Check(op.name, "changed by the adapter", found, ok=outcome.changed > 0)
    if op.quantization is not None:
        return Check(op.name, f"as in the dequantised {op.input}", "identical", ok=True)
    if op.transpose:
        return Check(op.name, f"as in the {op.input}, transposed", "identical", ok=True)
    if op.kind == "cast":
        return Check(op.name, f"as in the {op.input}, in {op.dtype}", "rounded once", ok=True)
    return Check(op.name, f"as in the {op.input}", "identical", ok=True)


def finite(name: str, outcome: Outcome) -> Check:
    """Of any tensor: that every element is a number."""
    bad = outcome.nonfinite
    return Check(name, "finite", f"{bad} elements not finite" if bad else "finite", ok=not bad)


def quantization_notes(done: Executed) -> dict[str, Any]:
    """How far 4 bits moved the base, beside what the adapter moves; empty where nothing did."""
    errors = done.quantization_error
    if not errors:
        return {}
    worst = max(errors, key=lambda name: errors[name])
    return {
        "quantization_error": {
            "meaning": "|W - dequantised W| / |scale B A|, Frobenius norms",
            "overall": done.overall_error,
            "max": errors[worst],
            "max_at": worst,
            "by_tensor": errors,
        }
    }


def merge_metrics(plan: Plan, done: Executed) -> dict[str, float]:
    """Tensors, how many of them an adapter changes, and the overall quantisation error."""
    found = {
        "tensors": float(len(plan.ops)),
        "folded": float(sum(bool(op.terms) for op in plan.ops)),
    }
    if done.overall_error is not None:
        found["quantization_error"] = done.overall_error
    return found
