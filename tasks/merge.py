"""merge: adapter + base -> `weights`, streamed tensor by tensor; `tasks/delivery/plan.py` plans it.

A QLoRA adapter was trained on the *quantised* base, and merging it into the original base gives
another model. `merge.base=dequantized`, the default for QLoRA, merges it into the dequantised base.
A base that is stored in 4 bits is always dequantised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.core.contract import Check
from tasks.delivery.base import ORIGINAL, BaseChoice
from tasks.delivery.plan import Work
from tasks.delivery.tokens import write_weights_files
from tasks.drift.fingerprint import PROFILES
from tasks.drift.verdict import rounding_warning
from tasks.evaluation.measuring import Measuring, stage_report, values_read
from tasks.pipeline.stage import StageReport
from tasks.process.output import Log
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.lora import INPUT, read_adapter
from tasks.weights.model import Perform, perform
from tasks.weights.plan import Executed, Plan
from tasks.weights.proof import recompute, recomputed_check
from tasks.weights.rounding import described
from tasks.weights.write import write


def merge(
    out: Path,
    *,
    adapter: Path,  # SOURCE, or the output of gather
    base: Path,
    planned: Callable[[], Work],
    log: Log,
    measuring: Measuring | None = None,
    perform: Perform = perform,
    **_: Any,
) -> StageReport:
    """Write the merged model in the dtype and files that are served, so that convert only links.

    Sampled rows of each tensor are recomputed from the inputs. Raises ArtifactError for unreadable
    files or a full disk, ContractError if the adapter does not fit the base.
    """
    work = planned()
    plan, choice, sources = work.plan, work.choice, dict(work.sources)
    if work.gather is not None:
        sources[INPUT] = read_adapter(adapter).tensors
    write_weights_files(out, work, base)
    folded = sum(bool(op.terms) for op in plan.ops)
    log.info("merge: %d of %d tensors change", folded, len(plan.ops))
    done = perform(write, plan, sources, out)
    if warning := unchanged(done):
        log.warning("merge: %s", warning)
    limit = PROFILES["standard"] if measuring is None else measuring.limit
    checks, kept, rounding = rounding_kept(plan, done, limit.kept)
    recomputed = recomputed_check(perform(recompute, plan, sources, read_checkpoint(out)))
    report = stage_report(
        "weights",
        out,
        plan,
        done,
        [*values_read(plan, done), *checks, recomputed],
        measuring=None if measuring is None else replace(measuring, cause=_cause(choice)),
        metrics={"folded": float(folded), **kept},
        notes={**rounding, "merge_base": choice.as_json()},
    )
    if measuring is not None and (warning := rounding_warning(measuring.reference, report.drift)):
        log.warning("merge: %s", warning)
    return report


def _cause(choice: BaseChoice) -> str:
    """Return the likely cause of a drift although every checked row is right, and what to type."""
    if choice.mode == ORIGINAL and choice.quantization is not None:
        return (
            "the adapter was trained on the base in 4 bits and merged into the one in 16: "
            "merge.base=auto"
        )
    return (
        "every sampled row is base + adapter, so rounding took it away: convert.dtype=float32 "
        "rounds nothing"
    )


_NAMED = 0.99
"""Below this share the tensors that lost most are named."""


def unchanged(done: Executed) -> str:
    """Return a warning about tensors that the adapter names and leaves as they are; "" for none."""
    same = [name for name, each in done.changed.items() if each.changed == 0]
    if not same:
        return ""
    return (
        f"{len(same)} of {len(done.changed)} tensors of the adapter keep the base's values, first "
        f"{same[0]}: their update is zero, or rounds away"
    )


def rounding_kept(
    plan: Plan, done: Executed, least: float
) -> tuple[list[Check], dict[str, float], dict[str, Any]]:
    """Return a check, metrics and notes of what rounding kept of the update; empty if unchanged.

    Unbiased rounding keeps it on average, so only its random part is reported; the recomputed rows
    prove it. `least` is the share of the update that rounding to nearest has to keep.
    """
    shares = done.kept()
    if shares is None:
        return [], {}, {}
    kept, nearest = shares
    unbiased = any(op.unbiased for op in plan.ops)
    text = f"{kept:.1%}" + (f"; nearest would keep {nearest:.1%}" if unbiased else "")
    if kept < _NAMED:
        by_tensor = {n: each.kept / each.update for n, each in done.changed.items() if each.update}
        worst = sorted(by_tensor.items(), key=lambda item: item[1])[:3]
        text += "; least " + ", ".join(f"{name} {share:.1%}" for name, share in worst)
    hint = (
        f"rounding threw {1 - kept:.0%} of the adapter away: merge.rounding=unbiased keeps it in "
        "the same format; or convert.dtype=float32"
    )
    ok = unbiased or kept >= least
    check = Check("kept of the update", f">= {least:.0%}", text, ok=ok, hint=hint)
    numbers = {"kept": kept, "nearest_would_keep": nearest}
    how = described("unbiased" if unbiased else "nearest")
    notes = {"rounding": how | {name: round(share, 5) for name, share in numbers.items()}}
    return [check], numbers, notes
