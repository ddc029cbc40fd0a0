"""Events of training steps: kept beside the checkpoints, and replayed by a resumed run."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mlflow import MlflowClient

from flows.monitoring import Progress
from tasks.core.events import EVENTS, parse, rewind
from tasks.pipeline.artifact import Origin
from tasks.tracking.tracker import Tracker

PROGRAM = """
import sys
from pathlib import Path
from tasks.core.events import emit, keep_in
keep_in(Path(sys.argv[1]))
emit("plan", steps=12)
if sys.argv[2] == "1":
    emit("eval", when="before", step=0, loss=3.0)
for step in range(int(sys.argv[2]), int(sys.argv[3]) + 1):
    emit("samples", step=step, rows=[{"response": str(step)}])
    emit("step", step=step, loss=1 / step)
    if step % 4 == 0:
        emit("eval", when="during", step=step, loss=2 / step)
"""


def ranks(folder: Path, first: int, last: int) -> list[str]:
    """Run a process that takes steps, as rank 0 does. Returns its output."""
    argv = [sys.executable, "-c", PROGRAM, str(folder), str(first), str(last)]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.splitlines()


def tracked(tracker: Tracker, lines: Sequence[str], replayed: Sequence[object] = ()) -> str:
    """Show the events of a run in MLflow, as the flow does. Returns the id of its run."""
    with (
        tracker.flow("f", {}, "", {}),
        tracker.stage("train", Origin("shards", "train", "k")) as run,
    ):
        shown = Progress(run, logging.getLogger(__name__))
        for event in replayed:
            shown({**event, "replayed": True})  # type: ignore[dict-item]
        for line in lines:
            event = parse(line)
            assert event is not None
            shown(event)
    return run.run_id


def test_a_resumed_run_has_the_curves_of_an_undisturbed_one(tmp_path: Path, database: str) -> None:
    """Killed after step 7, with a checkpoint of step 4: steps 5 to 7 are taken twice."""
    tracker = Tracker(database, "e", tmp_path / "files", tmp_path / "reports")
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = tracked(tracker, ranks(tmp_path / "whole", 1, 12))
    tracked(tracker, ranks(tmp_path / "killed", 1, 7))
    with (tmp_path / "killed" / EVENTS).open("a") as file:
        file.write('{"event": "step", "st')  # cut off by the kill
    kept = rewind(tmp_path / "killed", 4)
    resumed = tracked(tracker, ranks(tmp_path / "killed", 5, 12), kept)

    client = MlflowClient(database)
    names = set(client.get_run(whole).data.metrics)
    assert names == set(client.get_run(resumed).data.metrics) >= {"train/loss", "eval/loss"}
    for name in names:
        curves = [
            [(m.step, m.value) for m in client.get_metric_history(run, name)]
            for run in (whole, resumed)
        ]
        assert sorted(curves[0]) == sorted(curves[1]), name
    losses = client.get_metric_history(resumed, "train/loss")
    assert [m.step for m in losses] == list(range(1, 13))
    times = [m.timestamp for m in losses]
    assert times == sorted(times)
    assert times[3] == kept[-2]["at"] < times[4]
