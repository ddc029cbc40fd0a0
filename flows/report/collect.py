"""Read what a run has left in its folder and in its artifacts, for the report.

A file that is missing or unreadable leaves its section empty; nothing here raises for it. All
texts are `plain`, since names, samples and errors can come from a checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

from flows.monitoring.run_record import PROGRESS, STEPS
from tasks.core.terminal import plain

SAMPLES_SHOWN = 12
TEXT_SHOWN = 1200
"""Most characters of a prompt or a response."""
CHECKS_SHOWN = 500
"""Most passed checks on the page; failed ones are shown without a limit."""
_TRAINING = re.compile(r"(.*\.)?train")

Curves = dict[str, list[tuple[int, float]]]
"""(step, value) pairs by the name of the metric; those of validations begin with `eval/`."""


@dataclass
class Handoff:
    """Drift of one hand-off and its limit.

    Attributes:
        measure: "mean KL" or "mean difference" of scores.
        unit: unit of both numbers.
        value: the drift.
        limit: the largest drift that is allowed.
        ok: False if the hand-off was refused.
    """

    measure: str
    unit: str
    value: float
    limit: float
    ok: bool = True

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Handoff | None:
        """Return the hand-off of an entry in the summary; None if it has none."""
        names = ("measure", "unit", "value", "limit", "ok")
        return cls(**{name: entry[name] for name in names}) if entry else None


@dataclass
class Stage:
    """One stage of a run.

    Attributes:
        name: name of the stage, without its step.
        step: the step it belongs to; empty if the run has a single step.
        seconds: wall-clock time; None if it is not known.
        state: "ran", "reused" or "failed".
        started: seconds from the start of the run; None if it is not known.
        checks: number of checks.
        artifact: path or name of what it published; empty if it published nothing.
        drift: drift of its hand-off; None if it measured none.
    """

    name: str
    step: str
    seconds: float | None
    state: str
    started: float | None = None
    checks: int = 0
    artifact: str = ""
    drift: Handoff | None = None


@dataclass
class Collected:
    """Contents of the report.

    Attributes:
        summary: summary.json.
        stages: the stages in order, one that failed included.
        curves: curves by the name of the training stage.
        lengths: (largest length of a bin, training rows) by the name of the training stage, and
            `train.max_len`.
        samples: prompt, expected text, responses before and after training.
        checks: all checks: stage, name, expected, found, ok; failed ones first.
        versions: versions of libraries, from the manifests.
        config: the configuration as YAML.
    """

    summary: dict[str, Any]
    stages: list[Stage] = field(default_factory=list)
    curves: dict[str, Curves] = field(default_factory=dict)
    lengths: dict[str, tuple[list[tuple[int, int]], int]] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    config: str = ""

    @property
    def hidden_checks(self) -> int:
        """Number of passed checks that the page leaves out."""
        return max(sum(stage.checks for stage in self.stages) - len(self.checks), 0)


def collect(folder: Path) -> Collected:
    """Return the contents of the report of a run.

    Args:
        folder: `<paths.runs>/reports/<run>`.

    Raises:
        OSError: there is no summary.json.
        ValueError: summary.json is damaged.
    """
    summary = cleaned(json.loads((folder / "summary.json").read_text()))
    progress = _document(folder / PROGRESS)
    collected = Collected(summary)
    with suppress(OSError):
        collected.config = plain((folder / "config.yaml").read_text())
    for entry in summary["stages"]:
        artifact = Path(entry["artifact"])
        checks = _checks(artifact)
        stage = _stage(entry)
        collected.stages.append(stage)
        collected.checks += [{"stage": entry["name"], **check} for check in checks]
        manifest = _document(artifact / "manifest.json")
        collected.versions |= manifest.get("versions", {})
        if _TRAINING.fullmatch(entry["name"]):
            source = _trained_by(folder, entry) if entry["reused"] else folder
            curves = _recorded(source, entry["name"]) or _losses(artifact)
            if curves:
                collected.curves[entry["name"]] = curves
            with suppress(KeyError, TypeError, ValueError):  # online, or of an older release
                bins = manifest["notes"]["data"]["train"]["lengths"]
                limit = manifest["config"]["settings"]["batch"]["max_len"]
                if bins:
                    listed = [(int(end), int(rows)) for end, rows in bins]
                    collected.lengths[entry["name"]] = (listed, int(limit))
        collected.samples = _samples(artifact / "generations.jsonl") or collected.samples
    _add_progress(collected, progress)
    collected.versions = {
        name: version for name, version in sorted(collected.versions.items()) if version != "absent"
    }
    passed = [check for check in collected.checks if check["ok"]][:CHECKS_SHOWN]
    collected.checks = [check for check in collected.checks if not check["ok"]] + passed
    return collected


def cleaned(value: Any) -> Any:
    """Return a JSON value with all texts `plain`."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, list):
        return [cleaned(item) for item in value]
    if isinstance(value, dict):
        return {plain(str(key)): cleaned(item) for key, item in value.items()}
    return value


def _stage(entry: Mapping[str, Any]) -> Stage:
    step, _, name = entry["name"].rpartition(".")
    state = "reused" if entry["reused"] else "ran"
    stage = Stage(name, step, entry["seconds"], state, checks=entry["tensors_checked"])
    stage.artifact = entry["artifact"]
    stage.drift = Handoff.read(entry.get("handoff") or {})  # an older release wrote none
    return stage


def _add_progress(collected: Collected, progress: Mapping[str, Any]) -> None:
    """Add when each stage began, and the stage that failed, which the summary does not name."""
    known = [f"{stage.step}.{stage.name}".lstrip(".") for stage in collected.stages]
    for entry in progress.get("stages", []):
        began = entry["started"] - progress["started"]
        if entry["name"] in known:
            stage = collected.stages[known.index(entry["name"])]
        elif entry["failed"]:
            step, _, name = entry["name"].rpartition(".")
            stage = Stage(name, step, entry["seconds"], "failed")
            refused = collected.summary.get("refused") or {}
            stage.drift = Handoff.read(refused if refused.get("stage") == entry["name"] else {})
            collected.stages.append(stage)
        else:
            continue
        stage.started = max(began, 0.0)


def _checks(artifact: Path) -> list[dict[str, Any]]:
    with suppress(OSError, ValueError, KeyError, TypeError):
        verdicts = json.loads((artifact / "contract.json").read_text())
        names = ("name", "expected", "found", "ok")
        return [cleaned({name: verdict[name] for name in names}) for verdict in verdicts]
    return []


def _trained_by(folder: Path, entry: Mapping[str, Any]) -> Path:
    """Return the folder of the run that trained an artifact; this run's if it is gone."""
    for steps in sorted(folder.parent.glob(f"*/{STEPS}"), reverse=True):
        stages = _document(steps.with_name("summary.json")).get("stages", [])
        if any(s["artifact"] == entry["artifact"] and not s["reused"] for s in stages):
            return steps.parent
    return folder


def _recorded(folder: Path, stage: str) -> Curves:
    """Return the curves that a run recorded of a training stage."""
    curves: dict[str, dict[int, float]] = {}
    for event in _lines(folder / STEPS):
        if event.get("stage") != stage or not isinstance(event.get("step"), int):
            continue
        prefix = "eval/" if event["event"] == "eval" else ""
        for name, value in event.items():
            if name != "step" and isinstance(value, int | float) and isfinite(value):
                curves.setdefault(prefix + name, {})[event["step"]] = float(value)
    return {name: sorted(points.items()) for name, points in curves.items()}


def _losses(artifact: Path) -> Curves:
    """Return the loss of each step, and the validations, from what training published."""
    trained = _document(artifact / "train.json")
    curves: Curves = {}
    for step, loss in enumerate(trained.get("losses", []), 1):
        if isfinite(loss):
            curves.setdefault("loss", []).append((step, loss))
    for evaluation in trained.get("evaluations", []):
        for name, value in evaluation.items():
            if name != "step" and isfinite(value):
                curves.setdefault(f"eval/{name}", []).append((int(evaluation["step"]), value))
    return curves


def _samples(path: Path) -> list[dict[str, Any]]:
    """Return the first responses before and after training, those that differ first."""
    samples = []
    for row in islice(_lines(path), 10 * SAMPLES_SHOWN):
        if "before" not in row or "after" not in row:
            continue
        turns = row.get("messages") or []
        prompt = "\n".join(str(turn.get("content", "")) for turn in turns)
        texts = {"prompt": prompt, **{key: row.get(key) for key in ("expected", "before", "after")}}
        sample = {key: plain(str(text or ""))[:TEXT_SHOWN] for key, text in texts.items()}
        samples.append({**sample, "changed": row["before"] != row["after"]})
    return sorted(samples, key=lambda sample: not sample["changed"])[:SAMPLES_SHOWN]


def _document(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        document = cleaned(json.loads(path.read_text()))
        return document if isinstance(document, dict) else {}
    return {}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with suppress(OSError), path.open(errors="replace") as file:
        for line in file:
            with suppress(ValueError):  # half a line of a run that was killed
                row = json.loads(line)
                if isinstance(row, dict):
                    yield row
