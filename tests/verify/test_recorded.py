"""Verifications that Prefect and MLflow record: `prefect=true`, and the deployment."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.verify.conftest import Answer
from tests.verify.serving import Running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
Verify = Callable[..., Answer]


def records(runs: Path, query: str) -> list[Any]:
    with sqlite3.connect(runs / "prefect" / "prefect.db") as database:
        return database.execute(query).fetchall()


def test_a_fault_is_a_failed_run_with_its_report(
    server: Running, models: Path, verify: Verify, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    words = (f"url={server.url}", f"source={models / 'lora-0'}", "prefect=true", "tag=nightly")
    answer = verify(*words, "name=zeros", f"paths.runs={runs}")
    assert answer.code == 1, answer.out + answer.err
    assert "Traceback" not in answer.err
    assert "base-served" in answer.out
    query = "select state_type, id from flow_run where name = 'verify-nightly'"
    ((state, run_id),) = records(runs, query)
    assert state == "FAILED"
    table = f"select data, key from artifact where flow_run_id = '{run_id}' and type = 'markdown'"
    ((text, key),) = records(runs, table)
    assert key == "verify-checks"
    assert "| distribution | FAULT |" in text

    client = MlflowClient(f"sqlite:///{runs / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("plumbline")
    query = f"tags.`prefect.flow_run_id` = '{run_id}'"
    (tracked,) = client.search_runs([experiment.experiment_id], query)
    tags, metrics = tracked.data.tags, tracked.data.metrics
    assert (tags["verify.verdict"], tags["verify.model"]) == ("fault", "zeros")
    assert "base-served" in tags["verify.causes"]
    assert metrics["verify/faults"] >= 1
    assert metrics["check/distribution/mean_kl"] > 0.01
    names = {artifact.path for artifact in client.list_artifacts(tracked.info.run_id)}
    assert names == {"report.json", "report.xml", "report.txt", "config.yaml"}
    kept = Path(client.download_artifacts(tracked.info.run_id, "report.json")).read_text()
    assert json.loads(kept) == answer.report

    good = verify(*words, "name=lora-0", f"paths.runs={runs}")
    assert good.code == 0, good.out + good.err
    states = records(runs, "select state_type from flow_run order by start_time")
    assert states == [("FAILED",), ("COMPLETED",)]
