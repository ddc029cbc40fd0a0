"""Results of writing: of one tensor and of a whole plan, and the checks and metrics made of them.

Checks use statistics that were counted while the bytes were written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from tasks.core.contract import Check
from tasks.weights.files.names import parse_peft
from tasks.weights.plan import Plan
from tasks.weights.rounding import described


@dataclass(frozen=True)
class Outcome:
    """Result of one finished tensor."""

    name: str
    file: str  # output file that holds it
    checksum: str  # BLAKE3 hash of its bytes
    nonfinite: int = 0  # number of NaN or infinite elements; also 0 if the values were not read
    # True if every element is zero; None if the values were not inspected
    all_zero: bool | None = None
    # fraction of elements that the adapter changed; None if it has no terms for it
    changed: float | None = None
    # squared Frobenius norm of the 4-bit quantization error; None if training did not quantize
    # the tensor
    error: float | None = None
    # squared Frobenius norm of the adapter's change D; None like `changed`
    delta: float | None = None
    # `<Q - W, D>` of the base W and the written tensor Q: `delta` if all is kept
    kept: float | None = None
    nearest: float | None = None  # the same for the sum rounded to nearest


@dataclass
class Measured:
    """Statistics of a tensor while it is computed; as in `Outcome`, but `changed` is a count."""

    nonfinite: int = 0
    changed: int = 0
    error: float | None = None
    delta: float = 0.0
    kept: float = 0.0
    nearest: float = 0.0


@dataclass(frozen=True)
class Executed:
    """Result of executing a plan."""

    outcomes: Mapping[str, Outcome]  # one per tensor, in the plan's order
    linked: Sequence[str] = ()  # output files that are an input's file, linked or copied as a whole
    read: int = 0  # bytes of tensor data that this process read; kernel copies are not counted
    written: int = 0  # bytes of tensor data that this process wrote

    @property
    def hashes(self) -> dict[tuple[str, str], str]:
        """Hash of every output tensor's bytes, by file and tensor, for `artifact.publish`."""
        return {(o.file, name): o.checksum for name, o in self.outcomes.items()}

    @property
    def checksums(self) -> dict[str, str]:
        """Hash of every output tensor's bytes, by name."""
        return {name: outcome.checksum for name, outcome in self.outcomes.items()}

    @property
    def changed(self) -> dict[str, float]:
        """Fraction of elements that the adapter changed, for tensors that it touches."""
        return {n: o.changed for n, o in self.outcomes.items() if o.changed is not None}

    @property
    def nonfinite(self) -> dict[str, int]:
        """Number of NaN or infinite elements, for tensors that have any."""
        return {n: o.nonfinite for n, o in self.outcomes.items() if o.nonfinite}

    @property
    def quantization_error(self) -> dict[str, float]:
        """`|W - W4|_F / |delta|_F` for tensors that training quantized and the adapter changes."""
        return {
            name: (outcome.error / max(outcome.delta, 1e-30)) ** 0.5
            for name, outcome in self.outcomes.items()
            if outcome.error is not None and outcome.delta is not None
        }

    @property
    def kept(self) -> float | None:
        """Share of the adapter's update that the output keeps; None if nothing was changed."""
        return self._share("kept")

    @property
    def nearest_keeps(self) -> float | None:
        """Share that the sums rounded to nearest would keep; None if nothing was changed."""
        return self._share("nearest")

    @property
    def kept_by_tensor(self) -> dict[str, float]:
        """`kept` of every tensor that the adapter changes."""
        return {
            name: (outcome.kept or 0.0) / outcome.delta
            for name, outcome in self.outcomes.items()
            if outcome.delta
        }

    def _share(self, part: str) -> float | None:
        changed = [outcome for outcome in self.outcomes.values() if outcome.delta]
        total = sum(outcome.delta or 0.0 for outcome in changed)
        return sum(getattr(outcome, part) for outcome in changed) / total if total else None

    @property
    def overall_error(self) -> float | None:
        """`quantization_error` over all tensors together; None if training did not quantize."""
        both = [
            (o.error, o.delta)
            for o in self.outcomes.values()
            if o.error is not None and o.delta is not None
        ]
        delta = sum(d for _, d in both)
        return (sum(e for e, _ in both) / delta) ** 0.5 if delta > 0 else None


_NAMED = 0.99
"""Below this share the tensors that lost most are named."""


def values_read(plan: Plan, done: Executed) -> list[Check]:
    """Check that all values that were read are finite; tensors copied by their hash are not."""
    checks = []
    for op in plan.ops:
        outcome = done.outcomes[op.name]
        if op.kind == "compute" or outcome.all_zero is not None:
            check = finite(f"values of {op.name}", outcome)
            if check.ok and outcome.changed is not None:
                check = replace(check, found=f"finite, {outcome.changed:.2%} of elements changed")
            checks.append(check)
    return checks


def gathered(plan: Plan, done: Executed) -> list[Check]:
    """Check the tensors gathered from partitions: finite, and not every lora_B is all zero."""
    checks = values_read(plan, done)
    keys = {op.name: parse_peft(op.name) for op in plan.ops}
    halves = [name for name, key in keys.items() if key is not None and key.half == "B"]
    if halves:
        # LoRA initialises B with zeros: one stays so if its module saw no data.
        zero = sum(bool(done.outcomes[name].all_zero) for name in halves)
        text = f"{zero} of {len(halves)} all zero"
        checks.append(Check("trained lora_B", "not all of them zero", text, zero < len(halves)))
    return checks


def unchanged(done: Executed) -> str:
    """Return a warning about tensors that the adapter names and leaves as they are; "" for none."""
    same = {name: outcome for name, outcome in done.outcomes.items() if outcome.changed == 0}
    if not same:
        return ""
    zero = sum(not outcome.delta for outcome in same.values())
    return (
        f"{len(same)} of {len(done.changed)} tensors of the adapter keep the base's values, first "
        f"{next(iter(same))}: the update of {zero} is zero, of {len(same) - zero} it rounds away"
    )


def finite(name: str, outcome: Outcome) -> Check:
    """Check that every element of a tensor is finite."""
    bad = outcome.nonfinite
    return Check(name, "finite", f"{bad} elements not finite" if bad else "finite", ok=not bad)


def kept_checks(plan: Plan, done: Executed, least: float) -> list[Check]:
    """Check that rounding kept the adapter's update; none if no tensor was changed.

    Unbiased rounding keeps it on average, so only its random part is reported; the recomputed rows
    prove it.

    Args:
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
