"""`python flows/status.py`: what runs and what ran, from files alone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from flows.monitoring.run_history import history
from flows.status import _document
from tests.conftest import PROJECT
from tests.monitoring.records import document, ended, status, write

RUNNING = """
import sys, time
from pathlib import Path
from tests.monitoring.records import STEP, record_at, result
with record_at(Path(sys.argv[1])) as record:
    record.call("prepare_base", lambda log: result("prepare_base"), {})
    with record.stage("train"):
        record.on_event({"event": "plan", "steps": 40})
        record.on_event(STEP)
        record._write()
        print("ready", flush=True)
        time.sleep(600)
"""


def test_a_run_in_progress_and_after_kill_9(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", RUNNING, str(tmp_path)]
    with subprocess.Popen(argv, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        (state,) = history(tmp_path)
        process.kill()
    running = _document(state)
    assert running["state"] == "running"
    assert (running["stage"], running["step"], running["steps"]) == ("train", 12, 40)
    assert running["numbers"]["loss"] == 0.5
    assert running["pid"] == process.pid
    assert running["exit_status"] is None
    assert [stage["name"] for stage in running["stages"]] == ["prepare_base", "train"]
    (state,) = history(tmp_path)
    assert state.state == "lost"


def test_every_way_to_end(tmp_path: Path) -> None:
    ended(tmp_path, "20261123-100000-aaaaaaaa", "completed")
    ended(tmp_path, "20261123-110000-bbbbbbbb", "failed", error="the loss is \x1b[31mnot finite")
    ended(tmp_path, "20261123-120000-cccccccc", "cancelled", flow="deliver")
    table = status(tmp_path)
    rows = {line.split()[2]: line for line in table.splitlines()[1:4]}
    assert list(rows) == ["cccccccc", "bbbbbbbb", "aaaaaaaa"]  # newest first
    assert "completed (0)" in rows["aaaaaaaa"]
    assert "loss 0.5" in rows["aaaaaaaa"]
    assert "1,234" in rows["aaaaaaaa"]
    assert "failed (1)" in rows["bbbbbbbb"]
    assert "train 12/40" in rows["bbbbbbbb"]
    assert "cancelled (130)" in rows["cccccccc"]
    assert "bbbbbbbb  the loss is not finite" in table
    (newest,) = json.loads(status(tmp_path, "json=true", "limit=1"))
    assert (newest["state"], newest["exit_status"]) == ("cancelled", 130)


def test_a_run_on_another_machine(tmp_path: Path) -> None:
    """The lock of such a run is not seen here, so that its last record decides."""
    for number, (silent_s, state) in enumerate(((20, "running"), (600, "lost"))):
        runs = tmp_path / str(number)
        record = document(host="another-node", written=time.time() - silent_s)
        write(runs, "20261123-140000-0a1b2c3d", record)
        assert [(run.state, run.host) for run in history(runs)] == [(state, "another-node")]
