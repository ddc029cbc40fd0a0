"""Write the records of runs as runs write them, and read the status as a user does."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from flows.monitoring.run_record import RunRecord
from flows.orchestration.summary import Summary
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.report import StageResult
from tests.commands import command, environment

STEP = {"event": "step", "step": 12, "loss": 0.5, "tokens_per_s": 1234.0, "step_s": 0.1}


def result(name: str, *, reused: bool = False) -> StageResult:
    """Return the result of a stage that published nothing."""
    return StageResult(name, Artifact("base", Path("/x"), ""), reused, 0.0, (), None, {})


def record_at(runs: Path, name: str = "20261123-140000-0a1b2c3d", flow: str = "rlhf") -> RunRecord:
    """Return the record of a run whose stages are called directly."""
    return RunRecord(runs / "reports" / name, flow, "qlora", lambda stage, work, inputs: work(None))


def ended(runs: Path, name: str, status: str, *, flow: str = "rlhf", error: str = "") -> None:
    """Write a run that has ended: its record and its summary."""
    with record_at(runs, name, flow=flow) as record:
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


def document(**changes: Any) -> dict[str, Any]:
    """Return a record in the middle of training, written on this machine just now."""
    now = time.time()
    stage = {
        "name": "train", "started": now - 60, "seconds": None, "reused": False, "failed": False,
        "step": 12, "steps": 40, "step_at": now, "seconds_per_step": 2.0,
        "numbers": {"loss": 0.5, "tokens_per_s": 1234.0},
    }  # fmt: skip
    about = {"run": "r", "flow": "rlhf", "exp": "qlora", "host": socket.gethostname(), "pid": 1}
    return {**about, "started": now - 70, "written": now, "stages": [stage], **changes}


def write(runs: Path, name: str, record: Any) -> Path:
    """Write a record as another machine's run, or a dead run, has left it."""
    folder = runs / "reports" / name
    folder.mkdir(parents=True)
    (folder / "progress.json").write_text(json.dumps(record))
    return folder


def status(runs: Path, *arguments: str) -> str:
    """Run `python flows/status.py` and return what it prints."""
    done = subprocess.run(
        command("status", f"paths.runs={runs}", *arguments), env=environment(), timeout=120,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout
