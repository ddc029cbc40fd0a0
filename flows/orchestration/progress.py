"""Receive the events of a stage's child process: numbers for the tracker, lines for the log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

LINE_EVERY_S, LONGEST_S = 5.0, 60.0
"""Shortest time between two lines of a log: a twentieth of the stage's time, within these."""
SHOWN = ("loss", "reward", "kl", "length", "value_loss", "tokens_per_s")
"""Numbers of a step to show, the most important first."""
MOST_SHOWN = 4
_NO_METRIC = {"event", "step", "total", "stage", "at"}


class Progress:
    """Receive the events of one stage's child process; `run` gets all numbers, `log` some lines."""

    def __init__(self, run: Any, log: Any) -> None:
        self._run = run
        self._log = log
        self._total = 0
        self._first: tuple[int, float] | None = None
        self._last_line = 0.0

    def __call__(self, event: dict[str, Any]) -> None:
        kind, at = event["event"], event.get("at")
        if kind == "plan":
            self._total = int(event["steps"])
        elif kind in ("step", "progress"):
            step = int(event["step"])
            self._total = int(event.get("total", self._total))
            values = {f"train/{name}": value for name, value in _numbers(event).items()}
            self._run.metrics(values, step, at)
            if "replayed" not in event:
                self._log_step(step, event)
        elif kind == "eval":
            self._eval(event, at)
        elif kind == "samples":
            rows = [{"step": event["step"], **row} for row in event["rows"]]
            self._run.table("samples", rows)

    def _log_step(self, step: int, event: Mapping[str, Any]) -> None:
        now = time.monotonic()
        first, began = self._first = self._first or (step, now)
        pause = min(max(LINE_EVERY_S, (now - began) / 20), LONGEST_S)
        if now - self._last_line <= pause and step != self._total:
            return
        self._last_line, left = now, ""
        if first < step < self._total:
            seconds = (now - began) / (step - first) * (self._total - step)
            left = f", {timedelta(seconds=round(seconds))} left"
        numbers = _numbers(event)
        names = [name for name in SHOWN if name in numbers][:MOST_SHOWN]
        text = ", ".join(f"{name} {numbers[name]:.4g}" for name in names)
        self._log.info("step %d/%d: %s%s", step, self._total, text, left)

    def _eval(self, event: Mapping[str, Any], at: int | None) -> None:
        values = {f"eval/{name}": value for name, value in _numbers(event).items()}
        self._run.metrics(values, event["step"], at)
        what, when = "loss" if "loss" in event else "reward", event["when"]
        if when in ("before", "after"):
            self._run.metrics({f"eval/{what}_{when}": float(event[what])}, at=at)
        if "replayed" not in event:
            step = event["step"]
            self._log.info("held-out %s %.4f %s training (step %d)", what, event[what], when, step)


def _numbers(event: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in event.items()
        if name not in _NO_METRIC and isinstance(value, int | float) and not isinstance(value, bool)
    }
