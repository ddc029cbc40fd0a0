"""Show the events of a child process: metrics, a progress bar on a terminal, lines in a log."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tasks.pipeline.report import StageRecord

LINE_EVERY_S = 5.0
"""Shortest time between two lines of a log, in seconds."""


class Progress:
    """Receive the events of one stage's child process; see `tasks/core/events.py`.

    Args:
        run: record that gets the metrics of each step.
        log: gets lines if standard error is no terminal.
    """

    def __init__(self, run: StageRecord, log: Any) -> None:
        self._run = run
        self._log = log
        self._total = 0
        self._bar: Any = None
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

    def close(self) -> None:
        """Remove the progress bar from the terminal."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _plan(self, event: dict[str, Any]) -> None:
        self._total = int(event["steps"])

    def _step(self, event: dict[str, Any]) -> None:
        step = int(event["step"])
        self._total = int(event.get("total", self._total))
        numbers = {k: v for k, v in event.items() if k not in _NO_METRIC and _is_number(v)}
        values = {f"train/{name}": value for name, value in numbers.items()}
        self._run.metrics(values, step, event.get("at"))
        if "replayed" in event:  # of an interrupted run, which has shown it
            return
        if sys.stderr.isatty():
            self._draw(step, event)
        elif time.monotonic() - self._last_line > LINE_EVERY_S or step == self._total:
            self._last_line = time.monotonic()
            self._log.info("step %d/%d: %s", step, self._total, _words(numbers))

    def _draw(self, step: int, event: dict[str, Any]) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, unit="step", leave=False, disable=False)
        self._bar.update(step - self._bar.n)
        self._bar.set_postfix_str(f"loss {event.get('loss', 0.0):.3f}", refresh=False)

    def _eval(self, event: dict[str, Any]) -> None:
        numbers = {k: v for k, v in event.items() if k not in _NO_METRIC and _is_number(v)}
        values, at = {f"eval/{name}": value for name, value in numbers.items()}, event.get("at")
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
    """Yield a `Progress`, and remove its bar at the end."""
    shown = Progress(run, log)
    try:
        yield shown
    finally:
        shown.close()


_NO_METRIC = {"event", "step", "total", "stage", "at"}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _words(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
