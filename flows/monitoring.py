"""Record what a run does while it goes on, and read what runs do and did: no server is asked.

`Progress` shows the numbers of a stage's child process: to the tracker, and as lines of a log.

A run writes `<paths.runs>/reports/<run>/progress.json` when a stage begins or ends, and while it
takes steps. It holds a lock (`flock`) on `.lock` beside it, which the kernel releases when the
process is gone, `kill -9` included. A run with a summary has ended. One without is running if its
lock is held; else it was lost: it ended without a word. Times are seconds since the epoch.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from math import isfinite
from pathlib import Path
from typing import Any

from tasks.pipeline.artifact import Artifact
from tasks.pipeline.stage import Call
from tasks.weights.files.documents import optional_json

log = logging.getLogger(__name__)

PROGRESS, LOCK = "progress.json", ".lock"
STEPS = "steps.jsonl"
"""Curves of the run: the events `step` and `eval` of its stages, one a line."""
BEAT_S = 5.0
"""Seconds between two records of steps, at least."""


_NO_METRIC = ("event", "step", "total", "stage", "at")


def numbers(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that were measured in an event of a child process."""
    return {
        name: value
        for name, value in event.items()
        if name not in _NO_METRIC and isinstance(value, int | float) and not isinstance(value, bool)
    }


@dataclass
class StageState:
    """Progress of one stage; `seconds` is None while it runs, and if the run was lost in it."""

    name: str
    started: float
    seconds: float | None = None
    reused: bool = False
    failed: bool = False
    step: int | None = None  # None without steps
    steps: int | None = None
    first: tuple[int, float] | None = None  # step and time of its first event
    latest: float | None = None  # time of the last one
    numbers: dict[str, float] = field(default_factory=dict)  # of the last step, such as `loss`

    @property
    def seconds_left(self) -> float | None:
        """Estimate of the time to its last step; None if it is not known."""
        if not (self.seconds is None and self.first and self.step and self.steps and self.latest):
            return None
        taken, since = self.step - self.first[0], self.latest - self.first[1]
        each = since / taken if taken else self.numbers.get("step_s", 0.0)
        left = (self.steps - self.step) * each - (time.time() - self.latest)
        return max(0.0, left) if each else None

    def note(self, event: Mapping[str, Any]) -> None:
        """Note an event of a child process (`tasks/core/events.py`)."""
        if event["event"] == "plan":
            self.steps, self.step = int(event["steps"]), int(event.get("taken", 0))
        elif event["event"] in ("step", "progress"):
            self.step, self.latest = int(event["step"]), time.time()
            self.steps = int(event.get("total", self.steps or 0)) or None
            if "replayed" not in event:
                self.first = self.first or (self.step, self.latest)
            self.numbers = {name: float(v) for name, v in numbers(event).items() if isfinite(v)}


class RunRecord:
    """Record of one run of a flow, a context manager that keeps it up to date.

    `folder` is `<paths.runs>/reports/<run>`; `call` calls the work of a stage. Nothing here raises:
    a run is worth more than its record.
    """

    def __init__(self, folder: Path, flow: str, exp: str | None, call: Call) -> None:
        self._folder, self._call = folder, call
        self._about: dict[str, Any] = {
            "flow": flow,
            "exp": exp or "",
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": time.time(),
        }
        self._stages: list[StageState] = []
        self._written = 0.0
        self._lock: int | None = None
        self._warned = False

    def __enter__(self) -> RunRecord:
        """Write the first record, and hold the lock."""
        with self._no_error():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)  # a reader holds it for microseconds
        self._write()
        return self

    def __exit__(self, *_: object) -> None:
        """Write the last record, after the summary, and release the lock."""
        self._write()
        if self._lock is not None:
            os.close(self._lock)

    def call(self, name: str, work: Callable[[Any], Any], inputs: Mapping[str, Artifact]) -> Any:
        """Call the work of a stage, and record when it begins and how it ends."""
        with self.stage(name) as state:
            result = self._call(name, work, inputs)
            state.reused = result.reused
        return result

    @contextmanager
    def stage(self, name: str) -> Iterator[StageState]:
        """Record a stage that runs within the block."""
        state = StageState(name, time.time())
        self._stages.append(state)
        self._write()
        try:
            yield state
        except Exception:
            state.failed = True
            raise
        finally:
            state.seconds = round(time.time() - state.started, 2)
            self._write()

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Note an event of the stage that runs; steps go into `STEPS`."""
        if not self._stages:
            return
        with self._no_error():
            self._stages[-1].note(event)
            if event["event"] in ("step", "eval"):
                line = json.dumps({**event, "stage": self._stages[-1].name})
                with (self._folder / STEPS).open("a") as file:
                    file.write(f"{line}\n")
        if time.time() - self._written > BEAT_S:
            self._write()

    def _write(self) -> None:
        self._written = time.time()
        fresh = self._folder / f".{PROGRESS}.{os.getpid()}"
        with self._no_error():
            stages = [asdict(stage) for stage in self._stages]
            document = {**self._about, "written": self._written, "stages": stages}
            fresh.write_text(json.dumps(document) + "\n")
            fresh.replace(self._folder / PROGRESS)

    @contextmanager
    def _no_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a full disk, a folder that somebody removed
            if not self._warned:
                log.warning("the record of this run cannot be written: %s", error)
            self._warned = True


@dataclass(frozen=True)
class RunState:
    """State of one run: "running", "lost", or that of its summary; texts are empty if not known."""

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


def history(runs: Path) -> list[RunState]:
    """Return the state of every run in a folder, newest first."""
    states = [_state_of(folder) for folder in (runs / "reports").glob("*") if folder.is_dir()]
    return sorted(states, key=lambda state: (state.started or 0.0, state.run), reverse=True)


def _state_of(folder: Path) -> RunState:
    """Return the state of one run, given its folder in `<paths.runs>/reports`."""
    is_locked = _is_locked(folder)  # first: a run that ends meanwhile has a summary by now
    record, summary = (optional_json(folder / name) for name in (PROGRESS, "summary.json"))
    state = summary.get("status") or ("running" if is_locked else "lost")
    message = summary.get("error") or summary.get("unregistered") or ""
    started, host, seconds = record.get("started"), record.get("host", ""), summary.get("seconds")
    if seconds is None and started is not None:
        seconds = (time.time() if state == "running" else record["written"]) - started
    if state == "lost":
        where = f", or its lock on {host} is not seen here" if host != socket.gethostname() else ""
        message = f"ended without a word{where}"
    return RunState(
        run=folder.name,
        state=state,
        flow=record.get("flow", ""),
        exp=record.get("exp", ""),
        host=host,
        pid=record.get("pid"),
        started=started,
        seconds=seconds,
        exit_status=summary.get("exit_status"),
        message=message,
        stages=tuple(StageState(**entry) for entry in record.get("stages", ())),
    )


def _is_locked(folder: Path) -> bool:
    """Return True if the process of a run holds the lock in its folder."""
    try:
        with (folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a file system without locks
        return False
    return False


LINE_EVERY_S, LONGEST_S = 5.0, 60.0
"""Shortest time between two lines of a log: a twentieth of the stage's time, within these."""
SHOWN = ("loss", "reward", "kl", "length", "value_loss", "tokens_per_s")
"""Numbers of a step to show, the most important first."""
MOST_SHOWN = 4


class Progress:
    """Receive the events of one stage's child process; `run` gets all numbers, `log` some lines."""

    def __init__(self, run: Any, log: Any) -> None:
        self._run, self._log = run, log
        self._state, self._last_line = StageState("", time.time()), 0.0

    def __call__(self, event: dict[str, Any]) -> None:
        kind, at = event["event"], event.get("at")
        self._state.note(event)
        if kind in ("step", "progress"):
            values = {f"train/{name}": value for name, value in numbers(event).items()}
            self._run.metrics(values, int(event["step"]), at)
            if "replayed" not in event:
                self._log_step(event)
        elif kind == "eval":
            self._eval(event, at)
        elif kind == "samples":
            rows = [{"step": event["step"], **row} for row in event["rows"]]
            self._run.table("samples", rows)

    def _log_step(self, event: Mapping[str, Any]) -> None:
        state, now = self._state, time.time()
        assert state.first is not None
        pause = min(max(LINE_EVERY_S, (now - state.first[1]) / 20), LONGEST_S)
        if now - self._last_line <= pause and state.step != state.steps:
            return
        self._last_line, seconds = now, state.seconds_left
        left = f", {timedelta(seconds=round(seconds))} left" if seconds else ""
        shown = numbers(event)  # with infinities
        names = [name for name in SHOWN if name in shown][:MOST_SHOWN]
        text = ", ".join(f"{name} {shown[name]:.4g}" for name in names)
        self._log.info("step %d/%d: %s%s", state.step, state.steps or 0, text, left)

    def _eval(self, event: Mapping[str, Any], at: int | None) -> None:
        values = {f"eval/{name}": value for name, value in numbers(event).items()}
        self._run.metrics(values, event["step"], at)
        what, when = "loss" if "loss" in event else "reward", event["when"]
        if when in ("before", "after"):
            self._run.metrics({f"eval/{what}_{when}": float(event[what])}, at=at)
        if "replayed" not in event:
            step = event["step"]
            self._log.info("held-out %s %.4f %s training (step %d)", what, event[what], when, step)
