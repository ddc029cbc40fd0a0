"""Unusable input gives one clear message and the right exit status, and leaves no files."""

from __future__ import annotations

import fcntl
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.commands import command, environment, mlflow_client
from tests.e2e.conftest import Run, living


def test_a_folder_that_another_run_uses_is_left_alone(
    rlhf: Callable[..., Run], tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    with (runs / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = rlhf(runs, "+exp=sft_qlora", "paths.wait_s=0")
    assert done.code == 1
    assert "paths.wait_s=null" in done.output
    assert [p.name for p in runs.iterdir()] == [".lock"]


@pytest.mark.slow  # tests/process has it without a flow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_ranks_train_ends_everything(
    number: signal.Signals, status: int, chain: Run, tmp_path: Path
) -> None:
    overrides = [f"seed={status}", f"tag=signal{status}", f"paths.runs={chain.runs}"]
    argv = command("rlhf", "+exp=sft_qlora", *overrides)
    child = subprocess.Popen(
        argv, cwd=tmp_path, env=environment(), start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    lines: list[str] = []
    for line in child.stdout:
        lines.append(line)
        if "step 1/" in line:
            break
    assert len(living(chain.runs)) >= 3, "".join(lines)  # torchrun and its ranks
    os.killpg(child.pid, number)
    with suppress(subprocess.TimeoutExpired):
        child.communicate(timeout=300)
    assert child.returncode == status, living(chain.runs)
    assert not [line for line in living(chain.runs) if "tasks.training" in line]
    end = time.monotonic() + 300
    while living(chain.runs) and time.monotonic() < end:  # supervisors end after their children
        time.sleep(0.2)
    assert living(chain.runs) == []
    with sqlite3.connect(chain.runs / "prefect" / "prefect.db") as db:
        unfinished = "select name from {} where state_type in ('RUNNING', 'PENDING')"
        for table in ("flow_run", "task_run"):
            assert db.execute(unfinished.format(table)).fetchall() == []
    client = mlflow_client(f"sqlite:///{chain.runs}/mlflow/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "plumbline"]
    assert not client.search_runs([experiment.experiment_id], "attributes.status = 'RUNNING'")
