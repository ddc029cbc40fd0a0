"""A real run is killed in training: its status before, after, and in the next run's metrics."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.commands import command, environment
from tests.monitoring.records import status, status_json
from tests.monitoring.test_prometheus import samples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_status_of_a_run_that_is_killed(tmp_path: Path) -> None:
    argv = command("rlhf", "+exp=sft_qlora", "model.steps=20", f"paths.runs={tmp_path}/runs")
    runs = tmp_path / "runs"
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(argv, env=environment(), cwd=tmp_path, stdout=log, stderr=log) as process,
    ):
        deadline, run = time.monotonic() + 600, {}
        while run.get("stage") != "train" or not run.get("step"):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            run = (status_json(runs) if runs.is_dir() else [])[:1] or {}
            run = run[0] if run else {}
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
    again = subprocess.run(
        command("rlhf", "+exp=sft_qlora", "train.epochs=0", f"paths.runs={runs}"),
        env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert again.returncode != 0
    written = samples(runs / "metrics.prom")
    assert written["plumbline_runs_total", "rlhf", "lost"] in (0, 1)
