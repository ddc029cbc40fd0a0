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

from tasks.delivery.base import ORIGINAL, BaseChoice
from tasks.delivery.plan import Work
from tasks.delivery.tokens import write_weights_files
from tasks.drift.fingerprint import PROFILES
from tasks.drift.verdict import rounding_warning
from tasks.evaluation.measuring import Measuring, stage_report
from tasks.pipeline.stage import StageReport
from tasks.process.output import Log
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.lora import read_adapter
from tasks.weights.pairing import INPUT
from tasks.weights.perform import Perform, perform
from tasks.weights.proof import recompute, recomputed_check
from tasks.weights.write import write
from tasks.weights.written import rounding_kept, unchanged, values_read


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
