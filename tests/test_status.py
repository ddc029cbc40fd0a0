"""`python flows/status.py`: what runs and what ran, from files alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from flows.monitoring import RunRecord, history
from flows.orchestration.summary import Summary
from flows.status import _document
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.stage import StageResult
from tests.commands import command, environment
from tests.conftest import PROJECT

STEP = {"event": "step", "step": 12, "loss": 0.5, "tokens_per_s": 1234.0, "step_s": 0.1}
RUNNING = """
import sys, time
from pathlib import Path
from tests.test_status import STEP, record_at, result
with record_at(Path(sys.argv[1]), "20261123-140000-0a1b2c3d") as record:
    record.call("prepare_base", lambda log: result("prepare_base"), {})
    with record.stage("train"):
        record.on_event({"event": "plan", "steps": 40})
        record.on_event(STEP)
        record._write()
        print("ready", flush=True)
        time.sleep(600)
"""


def result(name: str, *, reused: bool = False) -> StageResult:
    """Return the result of a stage that published nothing."""
    return StageResult(name, Artifact("base", Path("/x"), ""), reused, 0.0, (), None, {})


def record_at(runs: Path, name: str, flow: str = "rlhf") -> RunRecord:
    """Return the record of a run whose stages are called directly."""
    return RunRecord(runs / "reports" / name, flow, "qlora", lambda stage, work, inputs: work(None))


def ended(runs: Path, name: str, status: str, *, flow: str = "rlhf", error: str = "") -> None:
    """Write a run that has ended: its record and its summary."""
    with record_at(runs, name, flow) as record:
        record.call("prepare_data", lambda log: result("prepare_data", reused=True), {})
        try:
            with record.stage("train"):
                record.on_event({"event": "plan", "steps": 40})
                record.on_event(STEP)
                if status == "failed":
                    raise ValueError(error)
        except ValueError:
            pass
        status_of = {"completed": 0, "failed": 1, "cancelled": 130}
        summary = Summary(status, flow, "qlora", 61.0, error=error or None)
        summary.exit_status = status_of[status]
        summary.write(runs, name, {})


def shown(runs: Path, *arguments: str) -> str:
    """Run `python flows/status.py` and return what it prints."""
    done = subprocess.run(
        command("status", f"paths.runs={runs}", *arguments), env=environment(), timeout=120,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


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
    table = shown(tmp_path)
    rows = {line.split()[2]: line for line in table.splitlines()[1:4]}
    assert list(rows) == ["cccccccc", "bbbbbbbb", "aaaaaaaa"]  # newest first
    for name, texts in (
        ("aaaaaaaa", ("completed (0)", "loss 0.5", "1,234")),
        ("bbbbbbbb", ("failed (1)", "train 12/40")),
        ("cccccccc", ("cancelled (130)",)),
    ):
        assert all(text in rows[name] for text in texts)
    assert "bbbbbbbb  the loss is not finite" in table
    (newest,) = json.loads(shown(tmp_path, "json=true", "limit=1"))
    assert (newest["state"], newest["exit_status"]) == ("cancelled", 130)
