"""Show what runs and what ran in a folder of runs, from its files alone.

    python flows/status.py                      runs in progress and the last ten that ended
    python flows/status.py paths.runs=DIR       of another folder of runs
    python flows/status.py limit=0              all of them
    python flows/status.py json=true            the same as JSON, with all numbers of the last step

No server is asked, so it works while a run goes on, after `kill -9`, and for runs on other machines
that write to the same folder, if its file system has locks. Exit status: 0, or 2 without a folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # flows/ would shadow libraries
    from flows.cli.start import start

    start("flows.cli.tool", "status")

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.cli.composed import Composed
from flows.cli.output import no_folder
from flows.monitoring import RunState, StageState, history
from tasks.core.errors import preflight
from tasks.core.terminal import plain

WIDTH = 100
"""Columns of the table if standard output is no terminal."""
SHOWN = ("loss", "reward", "kl")
"""Numbers of a step that the table shows."""
SPEEDS = ("tokens_per_s", "tokens_per_s/update", "tokens_per_s/generate")
"""Tokens per second of a step: of training, else of an update, else of rollouts."""


def job(composed: Composed, words: list[str]) -> int:
    """Run the command. Returns the exit status."""
    runs, limit = composed.runs, composed.settings["limit"]
    preflight(list(no_folder("paths.runs", str(runs))))
    states = history(runs)
    running = [state for state in states if state.state == "running"]
    ended = [state for state in states if state.state != "running"]
    shown = [*running, *(ended[:limit] if limit > 0 else ended)]
    if composed.settings["json"]:
        print(json.dumps([_document(state) for state in shown], indent=1))
    elif not shown:
        print(f"no runs in {runs}")
    else:
        _print(shown, len(states))
    return 0


def _document(state: RunState) -> dict[str, Any]:
    """Return a run as JSON, with what the table computes."""
    stage = state.stage or state.trained
    more: dict[str, Any] = {"stage": stage.name if stage else None}
    for name in ("step", "steps", "seconds_left"):
        more[name] = getattr(stage, name, None)
    return {**asdict(state), **more, "numbers": dict(stage.numbers) if stage else {}}


def _print(states: Sequence[RunState], known: int) -> None:
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("since", "run", "flow", "state"):
        table.add_column(title, overflow="fold")
    table.add_column("stage", overflow="fold", max_width=22)
    table.add_column("last step", overflow="fold", max_width=16)
    for title in ("tokens/s", "left", "took"):
        table.add_column(title, justify="right", no_wrap=True)
    for state in states:
        style = {"running": "bold", "completed": ""}.get(state.state, "red")
        table.add_row(*(Text(plain(cell)) for cell in _row(state)), style=style)
    console.print(table)
    for state in states:
        if state.message:
            line = plain(state.message.partition("\n")[0])
            console.print(Text(f"{_short(state)}  {line}"), soft_wrap=True)
    if known > len(states):
        console.print(f"{known - len(states)} more: limit=0")


def _row(state: RunState) -> list[str]:
    stage, trained = state.stage, state.trained
    status = f" ({state.exit_status})" if state.exit_status is not None else ""
    numbers = trained.numbers if trained else {}
    last = [f"{name} {numbers[name]:.4g}" for name in SHOWN if name in numbers]
    speed = next((numbers[name] for name in SPEEDS if name in numbers), None)
    left = stage.seconds_left if stage and state.state == "running" else None
    return [
        f"{datetime.fromtimestamp(state.started):%m-%d %H:%M}" if state.started else "",
        _short(state),
        f"{state.flow} {state.exp}".strip(),
        f"{state.state}{status}",
        _place(stage or (trained if state.state != "completed" else None)),
        ", ".join(last[:2]),
        "" if speed is None else f"{speed:,.0f}",
        "" if left is None else str(timedelta(seconds=int(left))),
        "" if state.seconds is None else str(timedelta(seconds=int(state.seconds))),
    ]


def _place(stage: StageState | None) -> str:
    if stage is None:
        return ""
    return stage.name if stage.step is None else f"{stage.name} {stage.step}/{stage.steps or '?'}"


def _short(state: RunState) -> str:
    """Return the end of a run's name, which tells runs apart."""
    return state.run.rpartition("-")[2][:8]
