"""Summary of a flow run: `<paths.runs>/latest/summary.json`, and tables of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tasks.core.terminal import plain
from tasks.pipeline.stage import StageResult
from tasks.release.gate import Gate, Verdict

DIGITS = 8
"""Digits of a digest in the table; a folder is found by them."""
_SHORT = {
    "mean KL": ("KL", "nats"),
    "median KL": ("median KL", "nats"),
    "p95 KL": ("p95 KL", "nats"),
    "mean difference": ("score", "std"),
}
_COUNTS = ("rows", "truncated", "tokens_cut", "too_long")
_TITLES = ("stage", "seconds", "", "checks", "drift", "", "limit", "", "artifact")
_LINE = "{:<20}  {:>7}  {:<6}  {:>6}  {:<12}  {:<4}  {:<10}  {:<2}  {}"
"""Columns of the table, as wide as they usually are."""


@dataclass
class Summary:
    """Summary of a flow run, written whether the run succeeded or not."""

    status: str  # "running", "completed", "failed" or "cancelled"
    flow: str
    exp: str | None
    seconds: float
    stages: list[dict[str, Any]] = field(default_factory=list)  # see `stage_entry`
    served: str | None = None  # path of the served model; the quantised one if there is one
    pages: dict[str, str] = field(default_factory=dict)  # in `prefect` and `mlflow`, if served
    mlflow_run_id: str | None = None
    # `passed`, `reasons`, `conditions` (rows of its table), `version`, `candidate`, `champion`
    gate: dict[str, Any] | None = None
    eval: dict[str, float | None] = field(default_factory=dict)  # see `evaluation`
    error: str | None = None
    exit_status: int | None = None
    tracking: str | None = None  # records that MLflow has not got
    unregistered: str | None = None  # why a complete model is not registered, and what to type
    findings: list[dict[str, Any]] = field(default_factory=list)  # of the audit of a delivery
    defaults: list[str] = field(default_factory=list)  # lines about computed defaults
    run: str = ""  # name of its folders under `<paths.runs>/logs` and `reports`
    unquantized: str | None = None  # path of the model that was quantised
    error_report: str | None = None  # as on the terminal: message, details, what to type, log
    # Hand-off that moved too far, as `handoff` in `stage_entry`, with its `stage`
    refused: dict[str, Any] | None = None
    command: str | None = None  # repeats the run
    # Bytes of one rank by name of the training stage: `planned` and `peak`
    memory: dict[str, dict[str, int]] = field(default_factory=dict)

    def write(self, runs: Path, run_id: str, texts: dict[str, str]) -> Path:
        """Write the summary to `<runs>/reports/<run_id>/` and make `<runs>/latest` a link to it.

        `texts` are further files by name. Returns the path of summary.json.
        """
        folder = runs / "reports" / run_id
        folder.mkdir(parents=True, exist_ok=True)
        document = json.dumps(asdict(self), indent=1) + "\n"
        for name, text in {"summary.json": document, "summary.txt": self.table(), **texts}.items():
            (folder / name).write_text(plain(text))
        link, fresh = runs / "latest", runs / f".latest.{os.getpid()}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(folder.relative_to(runs))
        if link.is_dir() and not link.is_symlink():  # a copy of the folder, made without links
            shutil.rmtree(link)
        fresh.replace(link)
        return folder / "summary.json"

    def table(self) -> str:
        """Return the summary as a plain-text table for a terminal."""
        rows = [_TITLES, *map(_row, self.stages)]
        if self.refused:
            cells = _handoff_cells(self.refused)
            rows.append((self.refused["stage"], "", "", "", *cells, "refused"))
        lines = [_LINE.format(*row).rstrip() for row in rows]
        verdicts = [Verdict(**row) for row in (self.gate or {}).get("conditions", ())]
        gate = [Gate(tuple(verdicts)).text(), ""] if verdicts else []
        return "\n".join([*lines, "", *gate, *self._closing()]) + "\n"

    def markdown(self, report: Path | None = None) -> str:
        """Return the summary for Prefect and MLflow, with the pages and the report of the run."""
        lines = [f"[{name}]({url})" for name, url in self.pages.items()]
        lines += ["", "```", self.table().rstrip(), "```"]
        return "\n".join([*lines, *([f"report: {report}"] if report else [])])

    def _closing(self) -> Iterator[str]:
        """Yield the lines below the table."""
        yield from evaluation_lines(self.eval)
        yield from (line for line in self.defaults if "train." in line)
        for stage in self.stages:
            yield from truncation_lines(stage)
        for what, handled in (("dealt with", True), ("for information", False)):
            codes = [each["code"] for each in self.findings if bool(each["handled"]) is handled]
            if codes:
                yield f"audit, {what}: {', '.join(dict.fromkeys(codes))}"
        if self.served:
            yield f"served model: {self.served}"
        if self.unquantized:
            yield f"in 16 bits: {self.unquantized}"
        if self.gate and self.gate.get("version"):
            yield f"registered: {candidate_line(self.gate)}"
        yield from filter(None, (self.unregistered, self.tracking))
        if self.error:
            yield f"failed: {self.error}"
        yield f"{self.status} in {self.seconds:.1f} s"


def candidate_line(registered: Mapping[str, Any]) -> str:
    """Return the registered `version`, and which one is the `candidate`, in one line."""
    version, candidate = registered["version"], registered["candidate"]
    champion = " @champion" if registered.get("champion") else ""
    if version == candidate:
        return f"{version} @candidate{champion}"
    return f"{version}{champion}; @candidate stays {candidate}, which was trained later"


def stage_entry(result: StageResult) -> dict[str, Any]:
    """Return the summary's entry for one stage.

    `handoff` has measure, unit, value, limit and verdict of the distance that is closest to its
    limit; None if the stage has measured no distance. `rows` has counts for each split that a stage
    tokenised: rows, rows cut, tokens cut, rows left out.
    """
    checks = [(check, check.bound) for check in result.checks if check.bound is not None]
    handoff = None
    if checks:
        check, bound = max(checks, key=lambda pair: pair[1].value - pair[1].limit)
        handoff = {**asdict(bound), "ok": check.ok}
    return {
        "name": result.name,
        "seconds": result.seconds,
        "reused": result.reused,
        "artifact": str(result.artifact.path),
        "tensors_checked": len(result.checks),
        "drift": result.drift,
        "handoff": handoff,
        "rows": {
            split: {name: int(result.metrics[f"data/{split}_{name}"]) for name in _COUNTS}
            for split in ("train", "heldout")
            if f"data/{split}_tokens_cut" in result.metrics
        },
    }


def truncation_lines(stage: Mapping[str, Any]) -> list[str]:
    """Return lines about the rows of a training stage that were cut or left out."""
    return [
        f"{stage['name']}: {split}.jsonl: {rows[count]} of {rows['rows']} rows {what}"
        for split, rows in stage.get("rows", {}).items()
        for count, what in (
            ("truncated", f"cut at train.max_len ({rows['tokens_cut']} tokens)"),
            ("too_long", "left out, longer than train.max_len"),
        )
        if rows[count]
    ]


def _row(stage: Mapping[str, Any]) -> tuple[str, ...]:
    kind, digest = Path(stage["artifact"]).parts[-2:] if stage["artifact"] else ("", "")
    return (
        stage["name"],
        f"{stage['seconds']:.1f}",
        "reused" if stage["reused"] else "",
        str(stage["tensors_checked"] or ""),
        *_handoff_cells(stage["handoff"]),
        f"{kind}/{digest[:DIGITS]}" if kind else "",
    )


def _handoff_cells(handoff: Mapping[str, Any] | None) -> Sequence[str]:
    """Return distance, unit, limit and verdict of a hand-off."""
    if handoff is None:
        return [""] * 4
    sign = "<=" if handoff["value"] <= handoff["limit"] else "> "
    measure, unit = _SHORT.get(handoff["measure"], (handoff["measure"], handoff["unit"]))
    value, limit = (f"{handoff[name]:.1e}" for name in ("value", "limit"))
    return [f"{measure} {value}", unit, f"{sign} {limit}", "ok" if handoff["ok"] else "NO"]


LM_EVAL = "lm_eval/"
_METRICS = {
    "before": "eval/before",
    "after": "eval/after",
    "loss_before": "heldout_loss_before",
    "loss_after": "heldout_loss_after",
    "pairs": "eval/pairs",
    "kept": "kept",
    "nearest_would_keep": "nearest_would_keep",
    "function_before": "eval/function_before",
    "function_after": "eval/function_after",
    "reward_before": "heldout_reward_before",
    "reward_after": "heldout_reward_after",
    "drawn_before": "drawn/before",
    "drawn_after": "drawn/after",
    "scored_before": "scored/before",
    "scored_after": "scored/after",
    "quantized": "quantized/eval/after",
    "quantized_loss_before": "quantized/loss/before",
    "quantized_loss_after": "quantized/loss/after",
}
"""Metrics by the name of a value in the summary."""
_ALWAYS = ("before", "after", "loss_before", "loss_after")
"""Values that are null if they were not measured; others are left out."""

_LINES = (
    ("kept", "nearest_would_keep",
     "merge: {0:.1%} of the update kept; to nearest it would be {1:.1%}"),
    ("before", "after", "{measure} {0:.1%} -> {1:.1%} ({points:+.1f} points)"),
    ("after", "quantized", "quantised: {1:.1%} beside {0:.1%} ({points:+.1f} points)"),
    ("quantized_loss_before", "quantized_loss_after",
     "quantised: held-out loss {1:.4f} beside {0:.4f}"),
    ("loss_before", "loss_after", "evaluation loss {0:.3f} -> {1:.3f}"),
    ("function_before", "function_after", "eval.function {0:.4g} -> {1:.4g}"),
    ("reward_before", "reward_after", "evaluation reward {0:.3f} -> {1:.3f}"),
    ("drawn_before", "drawn_after", "sampled exact match {0:.1%} -> {1:.1%}"),
    ("scored_before", "scored_after", "sampled reward {0:.2f} -> {1:.2f} ({change:+.2f} std)"),
)  # fmt: skip
"""Lines of the summary about two values each."""


def evaluation(results: Sequence[StageResult]) -> dict[str, float | None]:
    """Return what was measured before and after training by name, of the last step of a run."""
    metrics = last_metrics(results)
    values: dict[str, float | None] = {
        key: metrics.get(name)
        for key, name in _METRICS.items()
        if name in metrics or key in _ALWAYS
    }
    for name, value in metrics.items():
        if name.startswith(LM_EVAL) and name.endswith(("/before", "/after")):
            values["_".join(name.rsplit("/", 1))] = value
    # KL from the model before: the served model's, else the estimate that training logged.
    kl = metrics.get("drawn/kl", metrics.get("kl"))
    return values if kl is None else {**values, "kl": kl}


def of_last_step(results: Sequence[StageResult]) -> list[StageResult]:
    """Return the results of the last step: `<step>.<stage>` is the name of a stage."""
    steps = [result.name.rpartition(".")[0] for result in results]
    return [result for result, step in zip(results, steps, strict=True) if step == steps[-1]]


def last_metrics(results: Sequence[StageResult]) -> dict[str, float]:
    """Return the metrics of all stages of the last step."""
    return {name: value for r in of_last_step(results) for name, value in r.metrics.items()}


def evaluation_lines(values: Mapping[str, float | None]) -> Iterator[str]:
    """Yield the result of `evaluation` as the lines below the summary's table."""
    measure = "pairs in the right order" if "pairs" in values else "exact match"
    harness = (
        (f"{name}_before", f"{name}_after", f"{name.replace('/', ' ')} {{0:.4g}} -> {{1:.4g}}")
        for name in harness_names(values)
    )
    for first, second, line in (*_LINES, *harness):
        a, b = values.get(first), values.get(second)
        if a is not None and b is not None:
            yield line.format(a, b, measure=measure, change=b - a, points=100 * (b - a))
    if (kl := values.get("kl")) is not None:
        yield f"KL from the model before {kl:.2f} nats per token"


def harness_names(values: Mapping[str, float | None]) -> list[str]:
    """Return the scores of lm-evaluation-harness, `lm_eval/<task>/<metric>`."""
    names = [key for key in values if key.startswith(LM_EVAL) and key.endswith("_after")]
    return [name.removesuffix("_after") for name in names]
