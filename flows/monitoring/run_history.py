"""Read what runs do and did from `<paths.runs>/reports`; asks no server.

A run with a summary has ended. One without is running if its lock is held, or if it runs on another
machine and wrote its record within `SILENT_S` seconds, since locks do not cross every network file
system. Any other run was lost: it ended without a word (`kill -9`, a power cut).
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from flows.monitoring.run_record import BEAT_S, PROGRESS, StageState, is_locked

SILENT_S = 6 * BEAT_S
"""Seconds without a new record after which a run on another machine counts as lost."""
FINAL = ("completed", "failed", "cancelled")


@dataclass(frozen=True)
class RunState:
    """State of one run: "running", "lost", or one of `FINAL`; texts are empty if not known."""

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
        return self.stages[-1] if self.stages and self.stages[-1].seconds is None else None

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


def history(runs: Path) -> list[RunState]:
    """Return the state of every run in a folder, newest first."""
    folders = [folder for folder in (runs / "reports").glob("*") if folder.is_dir()]
    states = [state_of(folder) for folder in folders]
    return sorted(states, key=lambda state: (state.started or 0.0, state.run), reverse=True)


def state_of(folder: Path) -> RunState:
    """Return the state of one run, given its folder in `<paths.runs>/reports`."""
    now = time.time()
    locked = is_locked(folder)  # first: a run that ends meanwhile has a summary by now
    record, summary = _read(folder / PROGRESS), _read(folder / "summary.json")
    state, host = summary.get("status"), record.get("host", "")
    written = record.get("written", 0.0)
    if state not in FINAL:
        elsewhere = bool(host) and host != socket.gethostname() and now - written < SILENT_S
        state = "running" if locked or elsewhere else "lost"
    started = record.get("started") or _time_in_name(folder.name)
    seconds = summary.get("seconds") if state in FINAL else None
    if seconds is None and started is not None:
        seconds = max(0.0, (now if state == "running" else written) - started)
    stages = tuple(StageState(**entry) for entry in record.get("stages", ()))
    message = summary.get("error") or summary.get("unregistered") or ""
    if state == "lost":
        lost_in = stages[-1:] if stages and stages[-1].seconds is None else ()
        message = ", ".join(["ended without a word", *(stage.at for stage in lost_in)])
    return RunState(
        run=folder.name,
        state=state,
        flow=record.get("flow") or summary.get("flow") or "",
        exp=record.get("exp") or summary.get("exp") or "",
        host=host,
        pid=record.get("pid"),
        started=started,
        seconds=seconds,
        exit_status=summary.get("exit_status") if state in FINAL else None,
        message=message,
        stages=stages,
    )


def _read(path: Path) -> dict[str, Any]:
    """Return a JSON object; empty if there is none yet."""
    with suppress(OSError, ValueError):
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return document
    return {}


def _time_in_name(name: str) -> float | None:
    """Return the time that a run's name begins with; None for another name."""
    with suppress(ValueError):
        return datetime.strptime(name[:15], "%Y%m%d-%H%M%S").timestamp()
    return None
