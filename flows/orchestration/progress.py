"""Receive the events of a stage's child process: numbers for the tracker, lines for the log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from tasks.pipeline.report import StageRecord

LINE_EVERY_S = 5.0
"""Shortest time between two lines of a log, in seconds; later a twentieth of the stage's time..."""
LONGEST_S = 60.0
"""...up to this."""
SHOWN = ("loss", "reward", "kl", "length", "value_loss", "tokens_per_s")
"""Numbers of a step to show, the most important first."""
MOST_SHOWN = 4


class Progress:
    """Receive the events of one stage's child process; `run` gets all numbers, `log` some lines."""

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
        if "replayed" not in event:
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
