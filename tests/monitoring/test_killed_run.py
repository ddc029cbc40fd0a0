"""A real run is killed in training: its status before and after."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from flows.monitoring.prometheus import MetricsFile
from tests.commands import command, environment
from tests.monitoring.records import status, status_json
from tests.monitoring.test_prometheus import samples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_status_of_a_run_that_is_killed(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    # Longer than a beat of the record, on a fast machine too.
    settings = ("+exp=sft_qlora", "model.steps=20", "train.epochs=12", f"paths.runs={runs}")
    argv = command("rlhf", *settings)
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(argv, env=environment(), cwd=tmp_path, stdout=log, stderr=log) as process,
    ):
        deadline = time.monotonic() + 600
        run: dict[str, Any] = {}
        while run.get("stage") != "train" or not run.get("step"):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            run = next(iter(status_json(runs) if runs.is_dir() else []), {})
        assert run["state"] == "running"
        assert run["numbers"]["loss"] > 0
        assert run["steps"] > run["step"]
        assert samples(runs / "metrics.prom")["plumbline_running_runs", "rlhf"] == 1
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    (lost,) = status_json(runs)
    assert lost["state"] == "lost"
    assert lost["step"] >= run["step"]
    assert f"ended without a word, at step {lost['step']} of {lost['steps']} of train" in status(
        runs
    )
    MetricsFile(runs).write()  # as the next run does
    written = samples(runs / "metrics.prom")
    assert written["plumbline_runs_total", "rlhf", "lost"] == 1
    assert written["plumbline_stages_total", "rlhf", "lost", "train"] == 1
    assert written["plumbline_last_exit_status", "rlhf"] == -1
