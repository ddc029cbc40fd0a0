"""Read what runs do and did from `<paths.runs>/reports`; asks no server and never raises.

A run with a summary has ended. One without is running if its lock is held, or if it runs on another
machine and wrote its record within `SILENT_S` seconds, since locks do not cross every network file
system. Any other run was lost: it ended without a word (`kill -9`, a power cut).

The files may be half-written, or not ours: a value of a wrong type counts as missing.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from flows.monitoring.run_record import BEAT_S, PROGRESS, is_locked

SILENT_S = 6 * BEAT_S
"""Seconds without a new record after which a run on another machine counts as lost."""
FINAL = ("completed", "failed", "cancelled")
STATES = (*FINAL, "lost")
"""States of a run that has ended."""
LARGEST = 16 << 20
"""Bytes of a record or a summary; larger files are not read."""


@dataclass(frozen=True)
class StageState:
    """One stage of a run; times in seconds.

    Attributes:
        name: name of the stage, as `<step>.<stage>` if the run has several steps.
        seconds: wall-clock time; None while it runs, and if the run was lost in it.
        result: "done", "reused", "failed", or "" if it has not ended.
        started: when it began, since the epoch; None if it is not known.
        step: last training step; None for a stage without steps.
        steps: number of steps; None if it is not known.
        seconds_per_step: mean over its last steps; None if it is not known.
        seconds_left: estimate of the time to its last step; None if it is not known.
    """

    name: str
    seconds: float | None
    result: str
    started: float | None = None
    step: int | None = None
    steps: int | None = None
    seconds_per_step: float | None = None
    seconds_left: float | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def at(self) -> str:
        """Place in this stage, in words."""
        if self.step is None:
            return f"in {self.name}"
        return f"at step {self.step} of {self.steps or '?'} of {self.name}"


@dataclass(frozen=True)
class RunState:
    """State of one run.

    Attributes:
        run: name of its folder in `<paths.runs>/reports` and `logs`.
        state: "running", or one of `STATES`.
        flow: name of the flow; empty if it is not known.
        exp: the chosen experiment; empty if there is none.
        host: name of the machine; empty if it is not known.
        pid: process id on that machine; None if it is not known.
        started: seconds since the epoch; None if it is not known.
        exit_status: of the command; None while it runs, and for a lost run.
        message: why it did not complete; empty otherwise.
        stages: stages in order.
    """

    run: str
    state: str
    flow: str
    exp: str
    host: str
    pid: int | None
    started: float | None
    seconds: float | None
    exit_status: int | None
    message: str
    stages: tuple[StageState, ...]

    @property
    def stage(self) -> StageState | None:
        """The stage that runs, or in which the run was lost; None between stages."""
        return self.stages[-1] if self.stages and not self.stages[-1].result else None

    @property
    def trained(self) -> StageState | None:
        """The last stage that took steps."""
        return next((stage for stage in reversed(self.stages) if stage.numbers), None)

    @property
    def ended(self) -> float | None:
        """When it ended, in seconds since the epoch; None if that is not known."""
        if self.state == "running" or self.started is None:
            return None
        return self.started + (self.seconds or 0.0)


def history(
    runs: Path, now: float | None = None, known: Mapping[str, RunState] | None = None
) -> list[RunState]:
    """Return the state of every run in a folder, newest first.

    Args:
        now: seconds since the epoch; None for the current time.
    """
    now, here = now or time.time(), socket.gethostname()
    try:
        folders = [folder for folder in (runs / "reports").iterdir() if folder.is_dir()]
    except OSError:
        folders = []
    known = known or {}
    states = [known.get(folder.name) or state_of(folder, now, here) for folder in folders]
    return sorted(states, key=lambda state: (state.started or 0.0, state.run), reverse=True)


def state_of(folder: Path, now: float, here: str) -> RunState:
    """Return the state of one run.

    Args:
        folder: its folder in `<paths.runs>/reports`.
        now: seconds since the epoch.
    """
    locked = is_locked(folder)  # first: a run that ends meanwhile has a summary by now
    record, summary = _read(folder / PROGRESS), _read(folder / "summary.json")
    written, host = _number(record, "written"), _text(record, "host")
    state = _text(summary, "status")
    if state not in FINAL:
        elsewhere = bool(host) and host != here and now - (written or 0.0) < SILENT_S
        state = "running" if locked or elsewhere else "lost"
    started = _number(record, "started") or _time_in_name(folder.name)
    seconds = _number(summary, "seconds")
    if seconds is None and started is not None:
        last = now if state == "running" else written or started
        seconds = max(0.0, last - started)
    stages = _stages(record, summary, now)
    message = _text(summary, "error")
    if state == "lost":
        where = f", {stages[-1].at}" if stages and not stages[-1].result else ""
        message = f"ended without a word{where}"
    return RunState(
        run=folder.name,
        state=state,
        flow=_text(record, "flow") or _text(summary, "flow"),
        exp=_text(record, "exp") or _text(summary, "exp"),
        host=host,
        pid=_whole(record, "pid"),
        started=started,
        seconds=seconds,
        exit_status=_whole(summary, "exit_status") if state in FINAL else None,
        message=message or _text(summary, "unregistered") or _text(summary, "unpushed"),
        stages=stages,
    )


def _stages(
    record: Mapping[str, Any], summary: Mapping[str, Any], now: float
) -> tuple[StageState, ...]:
    """Return the stages of the record; those of the summary for a run without record."""
    entries = record.get("stages") or summary.get("stages")
    if not isinstance(entries, list):
        return ()
    return tuple(_stage(entry, now) for entry in entries if isinstance(entry, dict))


def _stage(entry: Mapping[str, Any], now: float) -> StageState:
    seconds, result = _number(entry, "seconds"), ""
    if seconds is not None:
        result = "reused" if entry.get("reused") is True else "done"
        result = "failed" if entry.get("failed") is True else result
    step, steps = _whole(entry, "step"), _whole(entry, "steps")
    left, of_step = None, _number(entry, "seconds_per_step")
    if seconds is None and step is not None and steps is not None and of_step is not None:
        since = now - (_number(entry, "step_at") or now)
        left = max(0.0, (steps - step) * of_step - since)
    numbers = entry.get("numbers")
    numbers = numbers if isinstance(numbers, dict) else {}
    return StageState(
        name=_text(entry, "name") or "?",
        seconds=seconds,
        result=result,
        started=_number(entry, "started"),
        step=step,
        steps=steps,
        seconds_per_step=of_step,
        seconds_left=left,
        numbers={k: v for k in numbers if (v := _number(numbers, k)) is not None},
    )


def _read(path: Path) -> dict[str, Any]:
    """Return a JSON object; empty if it cannot be read or is something else."""
    try:
        if path.stat().st_size > LARGEST:
            return {}
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _text(document: Mapping[str, Any], key: str) -> str:
    value = document.get(key)
    return value if isinstance(value, str) else ""


def _number(document: Mapping[str, Any], key: str) -> float | None:
    """Return a finite number within what a clock and a formatter can take."""
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _MOST:
        return None
    return float(value) if math.isfinite(value) else None


def _whole(document: Mapping[str, Any], key: str) -> int | None:
    value = _number(document, key)
    return None if value is None else int(value)


_MOST = 1e15


def _time_in_name(name: str) -> float | None:
    """Return the time that a run's name begins with; None for another name."""
    try:
        return datetime.strptime(name[:15], "%Y%m%d-%H%M%S").timestamp()
    except (ValueError, OverflowError):
        return None
