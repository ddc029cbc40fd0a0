"""The drift of what a stage made, from the reference: measured, or carried over."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tasks.delivery.recognise import CONFIG
from tasks.drift.fingerprint import DriftLimit
from tasks.drift.verdict import FINGERPRINT
from tasks.evaluation.scoring import ModelRef, Score
from tasks.evaluation.trained_artifact import carry_over, measure
from tasks.pipeline.report import StageReport
from tasks.weights.files.reader import read_json


@dataclass(frozen=True)
class Measuring:
    """Who measures drift, how, and how far is too far.

    Attributes:
        score: who measures.
        limit: of the drift.
        attn_implementation: with which attention, transformers' name.
    """

    score: Score
    limit: DriftLimit
    attn_implementation: str


def measured(
    report: StageReport,
    out: Path,
    reference: Path | None,
    measuring: Measuring | None,
    *,
    earlier: Path | None = None,
) -> StageReport:
    """The report with the drift; carried over where every byte is that of the folder before."""
    if measuring is None or reference is None or not all(check.ok for check in report.checks):
        return report
    limit = measuring.limit
    if earlier is not None and (earlier / FINGERPRINT).is_file():
        found, verdict = carry_over(earlier, trained=reference, out=out, limit=limit)
    else:
        dtype = str(read_json(out / CONFIG)["dtype"])
        model = ModelRef(out, dtype=dtype, attn_implementation=measuring.attn_implementation)
        found, verdict = measure(
            measuring.score, model, trained=reference, out=out, limit=limit, exact=False
        )
    checks = (*report.checks, verdict)
    return StageReport(report.kind, checks, report.metrics, report.notes, found)
