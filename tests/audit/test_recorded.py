"""`prefect=true`: the records of an audit in Prefect and MLflow, read as users read them."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.audit.making import make_model, tensors
from tests.audit.test_command import Done, run

NIGHTLY = "where name = 'audit-nightly'"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # servers start


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture(scope="module")
def broken(place: Path) -> Path:
    """Make a model with two kinds of errors, and names that a page could render."""
    arrays = {f"module.{key}": array for key, array in tensors().items()}
    arrays["module.<b>|`x`</b>"] = arrays["module.lm_head.weight"][:0]
    return make_model(place / "broken", arrays)


@pytest.fixture(scope="module")
def done(place: Path, broken: Path) -> Done:
    return run(
        place / "elsewhere", f"source={broken}", "prefect=true", "tag=nightly",
        f"paths.runs={place / 'runs'}",
    )  # fmt: skip


@pytest.fixture(scope="module")
def report(done: Done) -> dict[str, Any]:
    """The report on standard output."""
    assert done.code == 1, done.err
    return dict(json.loads(done.out[done.out.index("{") :]))


def records(runs: Path, query: str) -> list[Any]:
    with sqlite3.connect(runs / "prefect" / "prefect.db") as database:
        return database.execute(query).fetchall()


def test_prefect_has_the_run_and_its_table(place: Path, report: dict[str, Any]) -> None:
    (flow,) = records(place / "runs", f"select state_type, parameters, id from flow_run {NIGHTLY}")
    assert flow[0] == "COMPLETED"
    assert f"source={report['source']}" in flow[1]
    tables = f"select data, key from artifact where flow_run_id = '{flow[2]}'"
    ((table, key),) = records(place / "runs", f"{tables} and type = 'markdown'")
    assert key == "audit-findings"
    codes = {finding["code"] for finding in report["findings"]}
    assert codes >= {"WRAPPER_RESIDUE", "EMPTY_TENSOR"}
    assert all(f"| {code} |" in table for code in codes)
    assert "`x`" not in table


def test_mlflow_has_the_findings(place: Path, report: dict[str, Any]) -> None:
    client = MlflowClient(f"sqlite:///{place / 'runs' / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("plumbline")
    ((flow_run,),) = records(place / "runs", f"select id from flow_run {NIGHTLY}")
    query = f"tags.`prefect.flow_run_id` = '{flow_run}'"
    (tracked,) = client.search_runs([experiment.experiment_id], query)
    assert (tracked.info.run_name, tracked.info.status) == ("audit broken", "FINISHED")
    tags, metrics = tracked.data.tags, tracked.data.metrics
    assert (tags["audit.kind"], tags["audit.ok"]) == ("model", "false")
    errors = [finding for finding in report["findings"] if finding["severity"] == "error"]
    assert metrics["audit/errors"] == len(errors)
    assert metrics["finding/WRAPPER_RESIDUE"] == 1
    assert metrics["audit/seconds"] > 0
    assert "| WRAPPER_RESIDUE |" in tags["mlflow.note.content"]
    assert tracked.data.params["source"] == report["source"]
    names = {artifact.path for artifact in client.list_artifacts(tracked.info.run_id)}
    assert names == {"report.json", "report.txt", "config.yaml"}
    kept = json.loads(
        Path(client.download_artifacts(tracked.info.run_id, "report.json")).read_text()
    )
    assert kept == report
