"""Read the files of a run and of its artifacts, for the report and for `plumbline compare`.

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

from flows.monitoring import PROGRESS, STEPS
from tasks.core.terminal import plain
from tasks.weights.files.documents import optional_json

SAMPLES_SHOWN, TEXT_SHOWN = 12, 1200
"""Most samples, and most characters of a prompt or a response."""
MANIFEST = "manifest.json"
_TRAINING = re.compile(r"(.*\.)?train")

Curves = dict[str, list[tuple[int, float]]]
"""(step, value) pairs by the name of the metric; those of validations begin with `eval/`."""


@dataclass
class Stage:
    """One stage of a run.

    `step` is empty if the run has a single step; `state` is "ran", "reused" or "failed"; `drift` is
    `handoff` in summary.json: measure, unit, value, limit, and if it was accepted.
    """

    name: str
    step: str
    seconds: float | None
    state: str
    checks: int = 0
    artifact: str = ""
    drift: dict[str, Any] | None = None

    @property
    def full_name(self) -> str:
        """`<step>.<stage>`; without a step, the stage."""
        return f"{self.step}.{self.name}".lstrip(".")


@dataclass
class Collected:
    """Contents of the report; curves and lengths are by the name of the training stage."""

    summary: dict[str, Any]  # summary.json
    stages: list[Stage] = field(default_factory=list)  # in order, one that failed included
    curves: dict[str, Curves] = field(default_factory=dict)
    # (largest length of a bin, training rows), and `train.max_len`
    lengths: dict[str, tuple[list[tuple[int, int]], int]] = field(default_factory=dict)
    # prompt, expected text, responses before and after training
    samples: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)  # of libraries, from the manifests
    config: str = ""  # YAML


def collect(folder: Path) -> Collected:
    """Return the contents of the report of a run, `<paths.runs>/reports/<run>`.

    Raises OSError if there is no summary.json, ValueError if it is damaged.
    """
    run = Collected(cleaned(json.loads((folder / "summary.json").read_text())))
    with suppress(OSError):
        run.config = plain((folder / "config.yaml").read_text())
    versions: dict[str, str] = {}
    for entry in run.summary["stages"]:
        full_name, artifact = entry["name"], Path(entry["artifact"])
        step, _, name = full_name.rpartition(".")
        state = "reused" if entry["reused"] else "ran"
        checks, drift = entry["tensors_checked"], entry.get("handoff")
        run.stages.append(
            Stage(name, step, entry["seconds"], state, checks, entry["artifact"], drift)
        )
        manifest = document(artifact / MANIFEST)
        versions |= manifest.get("versions", {})
        if _TRAINING.fullmatch(full_name):
            # A run that reused a training has its losses alone.
            if curves := _recorded(folder, full_name) or _losses(artifact):
                run.curves[full_name] = curves
            with suppress(KeyError, TypeError, ValueError):  # online training has no such rows
                bins = manifest["notes"]["data"]["train"]["lengths"]
                limit = manifest["config"]["settings"]["batch"]["max_len"]
                if bins:
                    run.lengths[full_name] = [(int(end), int(n)) for end, n in bins], int(limit)
        run.samples = _samples(artifact / "generations.jsonl") or run.samples
    run.stages += _failed(run, document(folder / PROGRESS))
    run.versions = {k: v for k, v in sorted(versions.items()) if v != "absent"}
    return run


def cleaned(value: Any) -> Any:
    """Return a JSON value with all texts `plain`."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, list):
        return [cleaned(item) for item in value]
    if isinstance(value, dict):
        return {plain(str(key)): cleaned(item) for key, item in value.items()}
    return value


def _failed(run: Collected, progress: Mapping[str, Any]) -> Iterator[Stage]:
    """Yield the stage that failed, which the summary does not name."""
    known = {stage.full_name for stage in run.stages}
    refused = run.summary.get("refused") or {}
    for entry in progress.get("stages", []):
        if entry["failed"] and entry["name"] not in known:
            step, _, name = entry["name"].rpartition(".")
            drift = refused if refused.get("stage") == entry["name"] else None
            yield Stage(name, step, entry["seconds"], "failed", drift=drift)


def _recorded(folder: Path, stage: str) -> Curves:
    """Return the curves that a run recorded of a training stage."""
    curves: dict[str, dict[int, float]] = {}
    for event in read_lines(folder / STEPS):
        if event.get("stage") != stage or not isinstance(event.get("step"), int):
            continue
        prefix = "eval/" if event["event"] == "eval" else ""
        for name, value in event.items():
            if name != "step" and isinstance(value, int | float) and isfinite(value):
                curves.setdefault(prefix + name, {})[event["step"]] = float(value)
    return {name: sorted(points.items()) for name, points in curves.items()}


def _losses(artifact: Path) -> Curves:
    """Return the loss of each step from what training published."""
    losses = enumerate(document(artifact / "train.json").get("losses", []), 1)
    points = [(step, loss) for step, loss in losses if isfinite(loss)]
    return {"loss": points} if points else {}


def _samples(path: Path) -> list[dict[str, Any]]:
    """Return the first responses before and after training, those that differ first."""
    samples = []
    for row in islice(read_lines(path), 10 * SAMPLES_SHOWN):
        if "before" not in row or "after" not in row:
            continue
        prompt = "\n".join(str(turn.get("content", "")) for turn in row.get("messages") or [])
        texts = {"prompt": prompt, **{key: row.get(key) for key in ("expected", "before", "after")}}
        sample = {key: plain(str(text or ""))[:TEXT_SHOWN] for key, text in texts.items()}
        samples.append({**sample, "changed": row["before"] != row["after"]})
    return sorted(samples, key=lambda sample: not sample["changed"])[:SAMPLES_SHOWN]


def document(path: Path) -> dict[str, Any]:
    """Return a JSON object with plain texts; empty if it is missing or cannot be read."""
    value: dict[str, Any] = cleaned(optional_json(path))
    return value


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines; none of a missing file."""
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(ValueError):  # half a line of a run that was killed
                row = json.loads(line)
                if isinstance(row, dict):
                    yield row
