"""Measure the drift of a stage's output from the reference."""

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
    """Settings of a drift measurement.

    Attributes:
        score: takes the fingerprint.
        limit: limits of the drift.
        attn_implementation: attention, by transformers' name.
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
    """Return the report with the drift added.

    Args:
        report: report of the stage; returned as it is if a check failed.
        out: output of the stage.
        reference: folder with the reference fingerprint; None measures nothing.
        measuring: settings of the measurement; None measures nothing.
        earlier: folder with the same bytes as `out`: its fingerprint is copied, not measured again.
    """
    if measuring is None or reference is None or not all(check.ok for check in report.checks):
        return report
    limit = measuring.limit
    if earlier is not None and (earlier / FINGERPRINT).is_file():
        drift, verdict = carry_over(earlier, trained=reference, out=out, limit=limit)
    else:
        dtype = str(read_json(out / CONFIG)["dtype"])
        model = ModelRef(out, dtype=dtype, attn_implementation=measuring.attn_implementation)
        drift, verdict = measure(
            measuring.score, model, trained=reference, out=out, limit=limit, exact=False
        )
    checks = (*report.checks, verdict)
    return StageReport(report.kind, checks, report.metrics, report.notes, drift)
