"""Show how far a run is: a live line on a terminal, lines in a log.

    stage 3/7 train ━━━━━━━━━━╸           40/70  0:00:12 left  loss 0.833

`Screen` is the live line of a run. `Progress` receives the events of one stage's child process
(`tasks/core/events.py`): it passes their numbers to the tracker, and logs a line now and then.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from tasks.pipeline.artifact import Artifact
from tasks.pipeline.report import StageRecord, StageResult
from tasks.pipeline.stage import Call

LINE_EVERY_S = 5.0
"""Shortest time between two lines of a log, in seconds; later a twentieth of the stage's time..."""
LONGEST_S = 60.0
"""...up to this."""
SHOWN = ("loss", "reward", "kl", "length", "value_loss", "tokens_per_s")
"""Numbers of a step to show, the most important first."""
MOST_SHOWN = 4


class Screen:
    """The live line of a run, a context manager; does nothing where standard error is no terminal.

    Log lines go above it.
    """

    def __init__(self, stages: int) -> None:
        self._stages, self._begun = stages, 0
        self._line: Any = None
        self._task: Any = None

    def __enter__(self) -> Screen:
        """Begin to draw."""
        if sys.stderr.isatty():
            self._line = _line()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the line."""
        if self._line is not None:
            self._line.stop()
            self._line = None

    def showing(self, call: Call) -> Call:
        """Return a `Call` that shows each stage while it runs.

        Args:
            call: calls the work of a stage.
        """

        def shown(
            name: str, work: Callable[[Any], StageResult], inputs: Mapping[str, Artifact]
        ) -> StageResult:
            self._begun += 1
            if self._line is not None:
                number = f"stage {self._begun}/{max(self._begun, self._stages)}"
                self._task = self._line.add_task(f"{number} {name}", total=None, numbers="")
            try:
                return call(name, work, inputs)
            finally:
                if self._line is not None:
                    self._line.remove_task(self._task)

        return shown

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Show the event of a child process of the stage."""
        if self._line is None or not self._line.tasks:
            return
        if event["event"] == "plan":
            taken = int(event.get("taken", 0))
            self._line.update(self._task, total=int(event["steps"]), completed=taken)
        elif event["event"] in ("step", "progress") and "replayed" not in event:
            known = {"total": int(event["total"])} if "total" in event else {}
            numbers = _words(event)
            self._line.update(self._task, completed=int(event["step"]), numbers=numbers, **known)


def _line() -> Any:
    """Return rich's progress display on standard error, started."""
    from rich import progress
    from rich.console import Console
    from rich.text import Text
    from rich.theme import Theme

    # Prefect's handler prints to a console of its own: its lines have to go above this one.
    handlers = logging.getLogger().handlers
    known = [getattr(handler, "console", None) for handler in handlers]
    consoles = [console for console in known if isinstance(console, Console)]
    for handler in handlers:
        handler.setFormatter(_Brief())
        if not any(isinstance(each, _OfStages) for each in handler.filters):
            handler.addFilter(_OfStages())
    console = consoles[0] if consoles else Console(stderr=True)
    console.push_theme(Theme())  # Prefect's has no style for a bar

    class Steps(progress.ProgressColumn):
        """Steps and time left; the time since it began, of a stage without steps."""

        def render(self, task: progress.Task) -> Text:
            if task.total is None:
                return Text(_duration(task.elapsed or 0.0))
            left = task.time_remaining
            shown = "" if left is None else f"  {_duration(left)} left"
            return Text(f"{int(task.completed)}/{int(task.total)}{shown}")

    line = progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=None),
        Steps(),
        progress.TextColumn("{task.fields[numbers]}", markup=False),
        console=console,
        transient=True,
        expand=True,
        refresh_per_second=4,
    )
    line.start()
    return line


class _OfStages(logging.Filter):
    """Leave out Prefect's lines for the begin and the end of a stage, which the live line shows."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(("Beginning flow run", "Finished in state"))


class _Brief(logging.Formatter):
    """Format a line as time, level if it is no INFO, and message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        level = "" if record.levelno <= logging.INFO else f"{record.levelname}: "
        text = f"{time.strftime('%H:%M:%S')} {level}{record.getMessage()}"
        return f"{text}\n{record.exc_text}" if record.exc_text else text


class Progress:
    """Receive the events of one stage's child process.

    Args:
        run: record that gets the metrics of each step.
        log: gets lines if standard error is no terminal.
    """

    def __init__(self, run: StageRecord, log: Any) -> None:
        self._run = run
        self._log = log
        self._total = 0
        self._first: tuple[int, float] | None = None
        self._last_line = 0.0
        self._on: Mapping[str, Callable[[dict[str, Any]], None]] = {
            "plan": self._plan,
            "step": self._step,
            "progress": self._step,
            "eval": self._eval,
            "samples": self._samples,
        }

    def __call__(self, event: dict[str, Any]) -> None:
        handler = self._on.get(event["event"])
        if handler is not None:
            handler(event)

    def _plan(self, event: dict[str, Any]) -> None:
        self._total = int(event["steps"])

    def _step(self, event: dict[str, Any]) -> None:
        step = int(event["step"])
        self._total = int(event.get("total", self._total))
        values = {f"train/{name}": value for name, value in _numbers(event).items()}
        self._run.metrics(values, step, event.get("at"))
        if "replayed" not in event and not sys.stderr.isatty():  # or the screen shows it
            self._log_step(step, event)

    def _log_step(self, step: int, event: Mapping[str, Any]) -> None:
        now = time.monotonic()
        first, began = self._first = self._first or (step, now)
        pause = min(max(LINE_EVERY_S, (now - began) / 20), LONGEST_S)
        if now - self._last_line > pause or step == self._total:
            self._last_line = now
            left = ""
            if first < step < self._total:
                seconds = (now - began) / (step - first) * (self._total - step)
                left = f", {_duration(seconds)} left"
            self._log.info("step %d/%d: %s%s", step, self._total, _words(event), left)

    def _eval(self, event: dict[str, Any]) -> None:
        values = {f"eval/{name}": value for name, value in _numbers(event).items()}
        at = event.get("at")
        self._run.metrics(values, event["step"], at)
        what = "loss" if "loss" in event else "reward"
        if event["when"] in ("before", "after"):
            self._run.metrics({f"eval/{what}_{event['when']}": float(event[what])}, at=at)
        if "replayed" in event:
            return
        self._log.info(
            "held-out %s %.4f %s training (step %d)",
            what, event[what], event["when"], event["step"],
        )  # fmt: skip

    def _samples(self, event: dict[str, Any]) -> None:
        self._run.table("samples", [{"step": event["step"], **row} for row in event["rows"]])


@contextlib.contextmanager
def progress(run: StageRecord, log: Any) -> Iterator[Progress]:
    """Yield a `Progress`."""
    yield Progress(run, log)


_NO_METRIC = {"event", "step", "total", "stage", "at"}


def _numbers(event: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in event.items()
        if name not in _NO_METRIC and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _words(event: Mapping[str, Any]) -> str:
    """Return the most important numbers of a step."""
    numbers = _numbers(event)
    names = [name for name in SHOWN if name in numbers][:MOST_SHOWN]
    return ", ".join(f"{name} {numbers[name]:.4g}" for name in names)


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
