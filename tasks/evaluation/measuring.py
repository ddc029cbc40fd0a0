"""Drift: the distance of each written model from the trained one, as the stages measure it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.core.contract import Check
from tasks.core.terminal import command
from tasks.drift.fingerprint import DriftLimit, Fingerprint
from tasks.drift.verdict import (
    KERNEL,
    NAMES,
    Moved,
    Print,
    engine_verdict,
    limit_in,
    load_print,
    moved,
    print_in,
    share_checks,
    verdict,
)
from tasks.evaluation.model_folder import computing_dtype_of
from tasks.evaluation.scoring import ModelRef, ReferenceScorer, Score
from tasks.pipeline.stage import StageReport
from tasks.weights.plan import Executed, Plan
from tasks.witness.plumbline_witness.prints import BASE, FINGERPRINT

Explain = Callable[[ModelRef, ModelRef, Sequence[Sequence[int]], str], str]
"""(model that is right, model that has drifted, probes, engine of the latter) -> one line: where
the two part."""


def located(
    check: Check,
    before: ModelRef | None,
    model: ModelRef,
    probes: Sequence[Sequence[int]],
    explain: Explain | None,
    *,
    engine: str = "transformers",
) -> Check:
    """Add the module in which two models part to a failed drift check."""
    if check.ok or before is None or explain is None:
        return check
    line = explain(before, model, probes, engine)
    return replace(check, found=f"{check.found}; {line}")


@dataclass(frozen=True)
class Measuring:
    """Settings of a drift measurement."""

    score: Score
    reference: Path  # folder with the fingerprint to compare with
    limit: DriftLimit
    attn_implementation: str = "sdpa"
    cause: str = ""  # the most likely cause of a failure, and what to type
    before: ModelRef | None = None  # the model before this stage, if transformers can load it
    # says where the measured model parts from `before`, after a failure
    explain: Explain | None = None
    float32: bool = True  # True to compute in float32, which judges the weights alone

    def take(self, model: ModelRef, out: Path) -> tuple[Moved, tuple[Check, ...]]:
        """Take the fingerprint of `model` into `out`. Returns the drift and its verdicts."""
        path = print_in(self.reference)
        reference = load_print(path)
        device = (reference.measured_on or {}).get("device")
        if isinstance(reference, Fingerprint):
            float32 = self.float32 and reference.arithmetic == "float32"
            model = replace(model, float32=float32)
        new = self.score(replace(model, device=device), path, out / path.name)
        if isinstance(reference, Fingerprint) and isinstance(new, Fingerprint):
            new = replace(new, formats=reference.formats)  # a server of `out` is judged by it
            new.save(out / path.name)
        drift, (check, *shares) = self._judge(reference, new, out, model.dtype)
        if isinstance(new, Fingerprint):
            check = located(check, self.before, model, reference.probes, self.explain)
        return drift, (check, *shares)

    def copy(self, earlier: Path, out: Path, dtype: str) -> tuple[Moved, tuple[Check, ...]]:
        """Copy the fingerprint of `earlier`, which has the same bytes, instead of taking it."""
        known = print_in(earlier)
        shutil.copyfile(known, out / known.name)
        return self._judge(load_print(print_in(self.reference)), load_print(known), out, dtype)

    def _judge(
        self, reference: Print, new: Print, out: Path, dtype: str
    ) -> tuple[Moved, tuple[Check, ...]]:
        limit, path = self.limit, print_in(self.reference)
        base = path.with_name(BASE)
        if base.is_file():  # `verify` tells a light adapter from its base by it
            shutil.copyfile(base, out / BASE)
        if isinstance(new, Fingerprint):
            limit = limit_in(limit, reference, new.arithmetic)
        drift = moved(reference, new, dtype)
        check = verdict(drift, limit, cause=self.cause)
        computed = new.arithmetic if isinstance(new, Fingerprint) else dtype
        return drift, (check, *share_checks(path, new, self.limit, computed, rounded=True))


def against_engine(
    scorer: ReferenceScorer,
    model: ModelRef,
    live: Path,
    out: Path,
    limit: DriftLimit,
    *,
    base: bool,  # True to take the fingerprint of the base alone, too
    cause: str = KERNEL,
) -> tuple[Fingerprint, Moved, Check]:
    """Take the reference fingerprint of `model` into `out`, and compare a live engine with it.

    Returns the fingerprint in the model's own dtype, the drift of the engine, and its verdict.
    """
    without = out / BASE if base else None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FINGERPRINT
        exact = scorer.reference(model, out / FINGERPRINT, like=live, own=path, base=without)
        own = Fingerprint.load(path)
    return own, *engine_verdict(exact, Fingerprint.load(live), limit, own, cause)


def stage_report(
    kind: str,
    out: Path,
    plan: Plan,
    done: Executed,
    checks: Sequence[Check],
    *,
    measuring: Measuring | None,
    metrics: Mapping[str, float] | None = None,
    notes: Mapping[str, Any] | None = None,
    model: ModelRef | None = None,  # the model to measure; None for the output
    earlier: Path | None = None,  # a folder with the same bytes, whose fingerprint is copied
) -> StageReport:
    """Return the report of a stage that wrote weights; drift is measured if all checks are met."""
    numbers = {
        "tensors": float(len(plan.ops)),
        "bytes": float(plan.nbytes),
        "files": float(len({written.file for written in done.tensors.values()})),
        "bytes_written": float(done.written),
        **(metrics or {}),
    }
    report = StageReport(kind, tuple(checks), numbers, dict(notes or {}), hashes=done.hashes)
    if measuring is None or not all(check.ok for check in checks):
        return report
    if earlier is not None and any((earlier / name).is_file() for name in NAMES):
        drift, verdicts = measuring.copy(earlier, out, computing_dtype_of(out))
    else:
        attention = measuring.attn_implementation
        model = model or ModelRef(out, dtype=computing_dtype_of(out), attn_implementation=attention)
        drift, verdicts = measuring.take(model, out)
    return replace(report, checks=(*checks, *verdicts), drift=drift)


def values_read(plan: Plan, done: Executed) -> list[Check]:
    """Check that all values that were read are finite; tensors copied by their hash are not."""
    checks = []
    for op in plan.ops:
        written = done.tensors[op.name]
        if op.kind == "compute" or written.all_zero is not None:
            check = finite(f"values of {op.name}", written.nonfinite)
            if check.ok and written.changed is not None:
                check = replace(check, found=f"finite, {written.changed:.2%} of elements changed")
            checks.append(check)
    return checks


def finite(name: str, bad: int) -> Check:
    """Check that a tensor has no element that is not finite."""
    hint = f"an input has them, or a sum overflows: {command('audit')} <input> values=true"
    text = f"{bad} elements not finite" if bad else "finite"
    return Check(name, "finite", text, ok=not bad, hint=hint)
