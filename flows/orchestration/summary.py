"""Summary of a flow run: `<paths.runs>/latest/summary.json`, and tables of it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flows.orchestration.evaluation import evaluation_lines
from tasks.core.terminal import plain
from tasks.pipeline.report import StageResult
from tasks.release.gate import table


@dataclass
class Summary:
    """Summary of a flow run, written whether the run succeeded or not.

    Attributes:
        status: "running", "completed", "failed" or "cancelled".
        flow: name of the flow.
        exp: the chosen experiment; None if there is none.
        seconds: wall-clock time of the run.
        stages: one entry for each stage, see `stage_entry`.
        served: path of the served model; the quantised one if there is one.
        unquantized: path of the model that was quantised; None for no quantised model.
        pages: pages of the run in `prefect` and `mlflow`, if a server has them.
        mlflow_run_id: id of the flow's MLflow run; None without MLflow.
        gate: verdict of the gate: `passed`, `reasons`, `conditions` (rows of its table), the
            registered `version`, and the versions that are the `candidate` and the `champion`.
        eval: evaluation results, see `evaluation`.
        error: message of the error that ended the run.
        error_report: the error as on the terminal: message, details, what to type, log.
        refused: the hand-off that moved too far, as `handoff` in `stage_entry`, with its `stage`.
        exit_status: of the command that ran it.
        tracking: what MLflow has not recorded, and when it will; None if it has everything.
        unregistered: why the model is not registered though the run is complete, and what to type.
        pushed: `repo`, `url` and `commit` of the copy on the Hub; None if nothing was pushed.
        unpushed: why the model is not on the Hub though the run is complete, and what to type.
        findings: findings of the audit that a delivery starts with.
        defaults: lines about computed defaults.
        run: name of the run's folders under `<paths.runs>/logs` and `reports`.
        command: what repeats the run; None if it was not started by a command.
        memory: bytes of one rank by name of the training stage: `planned` (without libraries) and
            `peak`, as far as they are known.
    """

    status: str
    flow: str
    exp: str | None
    seconds: float
    stages: list[dict[str, Any]] = field(default_factory=list)
    served: str | None = None
    pages: dict[str, str] = field(default_factory=dict)
    mlflow_run_id: str | None = None
    gate: dict[str, Any] | None = None
    eval: dict[str, float | None] = field(default_factory=dict)
    error: str | None = None
    exit_status: int | None = None
    tracking: str | None = None
    unregistered: str | None = None
    pushed: dict[str, str] | None = None
    unpushed: str | None = None
    findings: list[dict[str, Any]] = field(default_factory=list)
    defaults: list[str] = field(default_factory=list)
    run: str = ""
    unquantized: str | None = None
    error_report: str | None = None
    refused: dict[str, Any] | None = None
    command: str | None = None
    memory: dict[str, dict[str, int]] = field(default_factory=dict)

    def write(self, runs: Path, run_id: str, texts: dict[str, str]) -> Path:
        """Write the summary to `<runs>/reports/<run_id>/` and make `<runs>/latest` a link to it.

        Args:
            runs: `paths.runs`.

        Returns:
            Path of summary.json.
        """
        folder = runs / "reports" / run_id
        folder.mkdir(parents=True, exist_ok=True)
        document = json.dumps(asdict(self), indent=1) + "\n"
        for name, text in {"summary.json": document, "summary.txt": self.table(), **texts}.items():
            (folder / name).write_text(plain(text))
        link, fresh = runs / "latest", runs / f".latest.{os.getpid()}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(folder.relative_to(runs))
        if link.is_dir() and not link.is_symlink():
            shutil.rmtree(link)
        fresh.replace(link)
        return folder / "summary.json"

    def table(self) -> str:
        """Return the summary as a plain-text table for a terminal."""
        rows: list[tuple[str, ...]] = [
            ("stage", "seconds", "", "checks", "drift", "", "limit", "", "artifact")
        ]
        rows += [_row(stage) for stage in self.stages]
        if self.refused:
            handoff = _handoff_cells(self.refused)
            rows.append((self.refused["stage"], "", "", "", *handoff, "refused"))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        aligned = [
            "  ".join(
                cell.rjust(w) if i in (1, 3) else cell.ljust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        aligned.insert(1, "-" * max(len(line) for line in aligned))
        gate = [*table((self.gate or {}).get("conditions", ())), ""]
        return "\n".join([*aligned, "", *(gate if len(gate) > 2 else ()), *self._closing()]) + "\n"

    def markdown(self, report: Path | None = None) -> str:
        """Return the summary as a Markdown table, for Prefect and MLflow.

        Args:
            report: the run's page, to link the copy that MLflow serves; None for no link.
        """
        lines = [
            f"**{self.status}** in {self.seconds:.0f} s",
            *(f"[{name}]({url})" for name, url in self.pages.items()),
            "",
            f"| stage | seconds | reused | checks | {' | '.join(self._titles())} |",
            "|---|---|---|---|---|---|---|",
        ]
        for stage in self.stages:
            drift = stage["drift"] or {}
            numbers = [_number(drift.get(key)) for key in _columns(drift)]
            lines.append(
                f"| {stage['name']} | {stage['seconds']:.1f} | {'yes' if stage['reused'] else ''} "
                f"| {stage['tensors_checked']} | {' | '.join(numbers)} |"
            )
        # As plain text, MLflow's page would link it to a user of GitHub with this name.
        closing = [re.sub("(@c[a-z]+)", r"`\1`", line) for line in self._closing()]
        if rows := (self.gate or {}).get("conditions"):
            lines += ["", "```", *table(rows), "```"]
        if report is not None:
            records = self.pages.get("mlflow")
            link = f"[in MLflow]({records}/artifacts/{report.name}), " if records else ""
            closing.append(f"report: {link}{report}")
        return "\n".join([*lines, "", *(f"- {line}" for line in closing)])

    def _titles(self) -> tuple[str, str, str]:
        """Return the titles of the three columns of drift."""
        has_scores = any("mean_difference" in (stage["drift"] or {}) for stage in self.stages)
        return ("mean diff", "max diff", "order") if has_scores else ("mean KL", "p95 KL", "top-1")

    def _closing(self) -> list[str]:
        lines = evaluation_lines(self.eval)
        lines += [line for line in self.defaults if "train." in line]
        lines += [line for stage in self.stages for line in truncation_lines(stage)]
        lines += _audit_lines(self.findings)
        if self.served:
            lines.append(f"served model: {self.served}")
        if self.unquantized:
            lines.append(f"in 16 bits: {self.unquantized}")
        if self.gate and self.gate.get("version"):
            lines.append(f"registered: {candidate_line(self.gate)}")
        if self.pushed:
            lines.append(f"pushed: {self.pushed['url']} commit {self.pushed['commit'][:DIGITS]}")
        notes = (self.unregistered, self.unpushed, self.tracking)
        lines += [line for line in notes if line]
        if self.error:
            lines.append(f"failed: {self.error}")
        lines.append(f"{self.status} in {self.seconds:.1f} s")
        return lines


def candidate_line(registered: Mapping[str, Any]) -> str:
    """Return the registered `version`, and which one is the `candidate`, in one line."""
    version, candidate = registered["version"], registered["candidate"]
    champion = " @champion" if registered.get("champion") else ""
    if version == candidate:
        return f"{version} @candidate{champion}"
    return f"{version}{champion}; @candidate stays {candidate}, which was trained later"


def stage_entry(result: StageResult) -> dict[str, Any]:
    """Return the summary's entry for one stage."""
    return {
        "name": result.name,
        "seconds": result.seconds,
        "reused": result.reused,
        "artifact": str(result.artifact.path),
        "tensors_checked": len(result.checks),
        "drift": result.drift,
        "handoff": _handoff(result),
        "rows": _rows(result.metrics),
    }


def _handoff(result: StageResult) -> dict[str, Any] | None:
    """Return measure, unit, value, limit and verdict of the distance that is closest to its limit.

    None if the stage has measured no distance.
    """
    checks = [(check, check.bound) for check in result.checks if check.bound is not None]
    if not checks:
        return None
    check, bound = max(checks, key=lambda pair: pair[1].value - pair[1].limit)
    return {**asdict(bound), "ok": check.ok}


def _rows(metrics: Mapping[str, float]) -> dict[str, dict[str, int]]:
    """Return, for each split that a stage tokenised: rows, rows cut, tokens cut, rows left out."""
    return {
        split: {name: int(metrics[f"data/{split}_{name}"]) for name in _COUNTS}
        for split in ("train", "heldout")
        if f"data/{split}_tokens_cut" in metrics
    }


DIGITS = 8
"""Digits of a digest in the table; a folder is found by them."""
_SHORT = {
    "mean KL": ("KL", "nats"),
    "median KL": ("median KL", "nats"),
    "p95 KL": ("p95 KL", "nats"),
    "mean difference": ("score", "std"),
}
_COUNTS = ("rows", "truncated", "tokens_cut", "too_long")


def truncation_lines(stage: Mapping[str, Any]) -> list[str]:
    """Return lines about the rows of a training stage that were cut or left out."""
    lines = []
    for split, rows in stage.get("rows", {}).items():
        where, of = f"{stage['name']}: {split}.jsonl", f"of {_count(rows['rows'], 'row')}"
        if rows["truncated"]:
            tokens = _count(rows["tokens_cut"], "token")
            lines.append(f"{where}: {rows['truncated']} {of} cut at train.max_len ({tokens})")
        if rows["too_long"]:
            lines.append(f"{where}: {rows['too_long']} {of} left out, longer than train.max_len")
    return lines


def _audit_lines(findings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield which findings of the audit the delivery has dealt with, and which it reports only."""
    for what, handled in (("dealt with", True), ("for information", False)):
        codes = [each["code"] for each in findings if bool(each["handled"]) is handled]
        if codes:
            yield f"audit, {what}: {', '.join(dict.fromkeys(codes))}"


def _columns(drift: Mapping[str, float]) -> tuple[str, str, str]:
    """Return the keys of the three columns of drift: log-probabilities, or reward scores."""
    if "mean_difference" in drift:
        return ("mean_difference", "max_difference", "same_order")
    return ("mean_kl", "p95_kl", "top1_agreement")


def _row(stage: dict[str, Any]) -> tuple[str, ...]:
    kind, digest = Path(stage["artifact"]).parts[-2:] if stage["artifact"] else ("", "")
    return (
        stage["name"],
        f"{stage['seconds']:.1f}",
        "reused" if stage["reused"] else "",
        str(stage["tensors_checked"] or ""),
        *_handoff_cells(stage["handoff"]),
        f"{kind}/{digest[:DIGITS]}" if kind else "",
    )


def _handoff_cells(handoff: Mapping[str, Any] | None) -> tuple[str, str, str, str]:
    """Return distance, unit, limit and verdict of a hand-off, for the terminal."""
    if handoff is None:
        return "", "", "", ""
    sign = "<=" if handoff["value"] <= handoff["limit"] else "> "
    measure, unit = _SHORT.get(handoff["measure"], (handoff["measure"], handoff["unit"]))
    value, limit = (f"{handoff[name]:.1e}" for name in ("value", "limit"))
    return f"{measure} {value}", unit, f"{sign} {limit}", "ok" if handoff["ok"] else "NO"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if 0.01 <= value <= 10 else f"{value:.1e}"
