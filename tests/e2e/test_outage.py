"""A server is killed in the middle of training: MLflow's, then that of Prefect."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from tests.commands import command, environment, summary_of
from tests.tracking.mlflow_process import MlflowProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def test_training_survives_its_tracking_server(tmp_path: Path, runs: Path) -> None:
    server = MlflowProcess(tmp_path)
    server.start()
    uri = server.uri.replace("//", "//me:s3cret@")
    settings = ("+exp=sft_qlora", "seed=7")  # no other test has trained this
    argv = command("rlhf", *settings, f"paths.runs={runs}", f"tracking.uri={uri}")
    output = tmp_path / "output.txt"
    try:
        status, text = _run_with_outage(argv, runs, output, lambda flow: server.kill())
        outage = summary_of(runs)
        assert status == 3, text
        assert outage["status"] == "completed"
        assert "run the same command again" in outage["unregistered"]
        assert "records wait in" in outage["tracking"]
        assert text.count("The run goes on") == 1
        assert outage["unregistered"] in text

        server.start()
        again = subprocess.run(
            argv, env=environment(), timeout=700, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert again.returncode == 0, again.stdout
        done = summary_of(runs)
        assert all(stage["reused"] for stage in done["stages"] if stage["name"] != "register")
        assert done["gate"]["version"] == "models:/plumbline/1"
        assert done["tracking"] is done["unregistered"] is None
        _require_recorded(server.uri, outage["mlflow_run_id"])
    finally:
        server.kill()
    with_password = [
        path for path in runs.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()
    ]
    assert with_password == []
    assert "s3cret" not in text + again.stdout


def test_training_survives_the_server_of_prefect(tmp_path: Path, runs: Path) -> None:
    """All stages, the served model and MLflow are complete; the summary says what is missing."""
    argv = command("rlhf", "+exp=sft_qlora", "seed=8", f"paths.runs={runs}")
    status, text = _run_with_outage(argv, runs, tmp_path / "output.txt", _kill_prefect)
    done = summary_of(runs)
    assert status == 0, text
    assert done["status"] == "completed"
    assert done["tracking"] is done["unregistered"] is None
    assert "are not recorded there, the end of this run neither" in done["prefect"]
    assert done["prefect"] in text
    assert text.count("The run goes on") == 1
    assert "Traceback" not in text
    assert Path(done["served"], "manifest.json").is_file()
    _require_recorded(f"sqlite:///{runs}/mlflow/mlflow.db", done["mlflow_run_id"])


def _run_with_outage(
    argv: list[str], runs: Path, output: Path, kill: Callable[[psutil.Process], None]
) -> tuple[int, str]:
    """Start a run, kill a server once it has trained. Returns its exit status and its output."""
    with (
        output.open("w") as file,
        subprocess.Popen(argv, env=environment(), stdout=file, stderr=file) as process,
    ):
        while process.poll() is None and not _has_trained(runs):
            time.sleep(0.05)
        assert process.poll() is None, output.read_text()
        kill(psutil.Process(process.pid))
        status = process.wait(700)
    return status, output.read_text()


def _kill_prefect(flow: psutil.Process) -> None:
    children = flow.children(recursive=True)
    servers = [child for child in children if "prefect_app" in " ".join(child.cmdline())]
    assert servers
    for server in servers:
        server.kill()


def _has_trained(runs: Path) -> bool:
    journals = (runs / "mlflow" / "outbox").glob("*/journal.jsonl")
    texts = [journal.read_text() for journal in journals]
    return any("train/loss" in text.partition('"name": "train"')[2] for text in texts)


def _require_recorded(uri: str, parent: str) -> None:
    """Check that the run of the outage is complete: every stage ended, every step once."""
    client = MlflowClient(uri)
    flow = client.get_run(parent)
    children = client.search_runs(
        [flow.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent}'"
    )
    stages = {run.data.tags["stage"]: run for run in children}
    assert {"train", "gather", "merge", "convert", "smoke_eval"} <= set(stages)
    assert {run.info.status for run in (flow, *children)} == {"FINISHED"}
    steps = [m.step for m in client.get_metric_history(stages["train"].info.run_id, "train/loss")]
    assert sorted(steps) == list(range(1, len(steps) + 1))
    assert len(steps) > 10
