"""Checks of written tensors, and metrics of an execution, for stages that run a plan.

Checks use statistics that were counted while the bytes were written.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

from tasks.core.contract import Check
from tasks.weights.execute.execute import Executed
from tasks.weights.execute.journal import Outcome
from tasks.weights.files.names import parse_peft
from tasks.weights.plan.operations import Op, Plan
from tasks.weights.rounding import described

_NAMED = 0.99
"""Below this share the tensors that lost most are named."""


def gathered(op: Op, outcome: Outcome) -> Check:
    """Check a tensor gathered from partitions: it is finite, and a lora_B is not all zero."""
    lora = parse_peft(op.name)
    is_b = lora is not None and lora.half == "B"
    bad, zero = outcome.nonfinite, bool(outcome.all_zero)
    text = f"{bad} elements not finite" if bad else "all zero" if zero else "finite, not all zero"
    # LoRA initialises B with zeros: if it is still all zero, the adapter was not trained.
    ok = not bad and not (is_b and zero)
    wanted = "finite, not all zero" if is_b else "finite"
    return Check(f"values of {op.name}", wanted, text, ok=ok)


def merged(op: Op, outcome: Outcome) -> Check:
    """Check a tensor of a merge: finite, and changed if the adapter touches it."""
    if outcome.nonfinite:
        return finite(op.name, outcome)
    if outcome.changed is not None:
        text = f"{outcome.changed:.2%} of elements changed"
        return Check(op.name, "changed by the adapter", text, ok=outcome.changed > 0)
    if op.quantization is not None:
        return Check(op.name, f"as in the dequantised {op.input}", "identical", ok=True)
    if op.transpose:
        return Check(op.name, f"as in the {op.input}, transposed", "identical", ok=True)
    if op.kind == "cast":
        return Check(op.name, f"as in the {op.input}, in {op.dtype}", "rounded once", ok=True)
    return Check(op.name, f"as in the {op.input}", "identical", ok=True)


def finite(name: str, outcome: Outcome) -> Check:
    """Check that every element of a tensor is finite."""
    bad = outcome.nonfinite
    return Check(name, "finite", f"{bad} elements not finite" if bad else "finite", ok=not bad)


def kept_checks(plan: Plan, done: Executed, least: float) -> list[Check]:
    """Check that rounding kept the adapter's update; none if no tensor was changed.

    Unbiased rounding keeps it on average, so only its random part is reported; the recomputed rows
    prove it.

    Args:
        plan: the executed plan.
        done: its result.
        least: share of the update that rounding to nearest has to keep.
    """
    kept, nearest = done.kept, done.nearest_keeps
    if kept is None or nearest is None or not isfinite(kept):
        return []  # elements that are not finite fail checks of their own
    unbiased = any(op.unbiased for op in plan.ops)
    text = f"{kept:.1%}" + (f"; nearest would keep {nearest:.1%}" if unbiased else "")
    if kept < _NAMED:
        worst = sorted(done.kept_by_tensor.items(), key=lambda item: item[1])[:3]
        text += "; least " + ", ".join(f"{name} {share:.1%}" for name, share in worst)
    hint = (
        f"rounding threw {1 - kept:.0%} of the adapter away: merge.rounding=unbiased keeps it in "
        "the same format; or convert.dtype=float32"
    )
    ok = unbiased or kept >= least
    return [Check("kept of the update", f">= {least:.0%}", text, ok=ok, hint=hint)]


def rounding_notes(plan: Plan, done: Executed) -> dict[str, Any]:
    """Return the rounding of a merge and what it kept, for the manifest; {} if none was needed."""
    kept, nearest = done.kept, done.nearest_keeps
    if kept is None or nearest is None or not isfinite(kept):
        return {}
    unbiased = any(op.unbiased for op in plan.ops)
    return {
        "rounding": {
            **described("unbiased" if unbiased else "nearest"),
            "kept": round(kept, 5),
            "nearest_would_keep": round(nearest, 5),
            "by_tensor": {name: round(share, 4) for name, share in done.kept_by_tensor.items()},
        }
    }


def quantization_notes(done: Executed) -> dict[str, Any]:
    """Return the quantization error relative to the adapter's change; {} if there is none."""
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
    """Return counts of all and of changed tensors, and the overall quantization error."""
    metrics = {
        "tensors": float(len(plan.ops)),
        "folded": float(sum(bool(op.terms) for op in plan.ops)),
    }
    if done.kept is not None and done.nearest_keeps is not None:
        metrics |= {"kept": done.kept, "nearest_would_keep": done.nearest_keeps}
    if done.overall_error is not None:
        metrics["quantization_error"] = done.overall_error
    return metrics
