"""Record of a run while it goes on: `<paths.runs>/reports/<run>/progress.json`.

    {"run": "...", "flow": "rlhf", "exp": "qlora", "host": "n7", "pid": 4242, "started": 1.7e9,
     "written": 1.7e9, "stages": [{"name": "train", "started": 1.7e9, "seconds": null,
     "reused": false, "failed": false, "step": 37, "steps": 120, "step_at": 1.7e9,
     "seconds_per_step": 0.8, "numbers": {"loss": 1.2}}]}

Times are seconds since the epoch. The file is replaced as a whole every `BEAT_S` seconds, and when
a stage begins or ends. The run holds a lock (`flock`) on `.lock` beside it, which the kernel
releases when the process is gone, `kill -9` included. Nothing here raises: a run is worth more than
its record.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from tasks.pipeline.artifact import Artifact
from tasks.pipeline.stage import Call

log = logging.getLogger(__name__)

PROGRESS, LOCK = "progress.json", ".lock"
STEPS = "steps.jsonl"
"""Curves of the run: the events `step` and `eval` of its stages, one a line."""
BEAT_S = 10.0
"""Seconds between two writes while nothing begins or ends."""
LAST_S = 5.0
"""Most seconds that a run waits for the thread at its end."""


@dataclass
class StageState:
    """Progress of one stage; times in seconds since the epoch.

    `seconds` is None while it runs, and if the run was lost in it; `step` without steps. `numbers`
    are those of the last step, such as `loss`.
    """

    name: str
    started: float
    seconds: float | None = None
    reused: bool = False
    failed: bool = False
    step: int | None = None
    steps: int | None = None
    step_at: float | None = None
    seconds_per_step: float | None = None
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def seconds_left(self) -> float | None:
        """Estimate of the time to its last step; None if it is not known."""
        known = (self.step, self.steps, self.step_at, self.seconds_per_step)
        if self.seconds is not None or None in known:
            return None
        step, steps, at, of_step = known
        return max(0.0, (steps - step) * of_step - (time.time() - at))  # type: ignore[operator]

    @property
    def at(self) -> str:
        """Place in this stage, in words."""
        if self.step is None:
            return f"in {self.name}"
        return f"at step {self.step} of {self.steps or '?'} of {self.name}"


class RunRecord:
    """Record of one run of a flow, a context manager that keeps it up to date.

    `folder` is `<paths.runs>/reports/<run>`; `call` calls the work of a stage.
    """

    def __init__(self, folder: Path, flow: str, exp: str | None, call: Call) -> None:
        self._folder, self._call = folder, call
        self._about = {
            "run": folder.name,
            "flow": flow,
            "exp": exp,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": time.time(),
        }
        self._stages: list[StageState] = []
        self._first: tuple[int, float] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run record", daemon=True)
        self._writing = threading.Lock()  # so that no thread replaces a newer record by an older
        self._lock: int | None = None
        self._warned = False

    def __enter__(self) -> RunRecord:
        """Write the first record, and start the thread that keeps it up to date."""
        with self._no_error():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)  # a reader holds it for microseconds
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Write the last record, after the summary, and release the lock."""
        self._write()
        self._over.set()
        self._thread.join(LAST_S)
        if self._lock is not None:
            os.close(self._lock)

    def call(self, name: str, work: Callable[[Any], Any], inputs: Mapping[str, Artifact]) -> Any:
        """Call the work of a stage, and record when it begins and how it ends."""
        with self.stage(name) as state:
            result = self._call(name, work, inputs)
            state.reused = result.reused
        return result

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[StageState]:
        """Record a stage that runs within the block."""
        state = StageState(name, time.time())
        self._first = None
        self._stages = [*self._stages, state]
        self._write()
        try:
            yield state
        except BaseException as error:
            state.failed = isinstance(error, Exception)
            raise
        finally:
            state.seconds = round(time.time() - state.started, 2)
            self._write()

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Note an event of a child process (`tasks/core/events.py`); steps go into `STEPS`."""
        if not self._stages:
            return
        state = self._stages[-1]
        with self._no_error():
            if event["event"] == "plan":
                state.steps, state.step = int(event["steps"]), int(event.get("taken", 0))
            elif event["event"] in ("step", "progress"):
                self._note_step(state, event)
            if event["event"] in ("step", "eval"):
                with (self._folder / STEPS).open("a") as file:
                    file.write(json.dumps({**event, "stage": state.name}) + "\n")

    def _note_step(self, state: StageState, event: Mapping[str, Any]) -> None:
        now = time.time()
        state.step, state.step_at = int(event["step"]), now
        state.steps = int(event.get("total", state.steps or 0)) or None
        first, began = self._first = self._first or (state.step, now)
        state.seconds_per_step = event.get("step_s")
        if state.step > first:
            state.seconds_per_step = (now - began) / (state.step - first)
        state.numbers = {
            name: float(value)
            for name, value in event.items()
            if name not in ("step", "total") and isinstance(value, int | float) and isfinite(value)
        }

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            self._write()

    def _write(self) -> None:
        with self._writing, self._no_error():
            stages = [asdict(stage) for stage in self._stages]
            document = {**self._about, "written": time.time(), "stages": stages}
            replace_file(self._folder / PROGRESS, json.dumps(document) + "\n")

    @contextlib.contextmanager
    def _no_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a full disk, a folder that somebody removed
            if not self._warned:
                log.warning("the record of this run cannot be written: %s", error)
            self._warned = True


def replace_file(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace a file as a whole: a reader sees the old text or the new one. Raises OSError."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text)
        fresh.chmod(mode)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def is_locked(folder: Path) -> bool:
    """Return True if the process of a run holds the lock in its folder."""
    try:
        with (folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a file system without locks
        return False
    return False
