"""A delivery with an engine, and its records in Prefect and MLflow."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.commands import command
from tests.delivery.conftest import Done, one_thread
from tests.delivery.dialects.saving import llamafactory_ppo
from tests.weights.heads.making import causal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STAGES = ["audit", "reference", "convert", "value_head", "smoke_eval"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture(scope="module")
def done(place: Path) -> Done:
    """The real command on a checkpoint of a PPO run of LLaMA-Factory."""
    llamafactory_ppo(causal("qwen"), place / "ppo")
    given = command(
        "deliver", f"source={place / 'ppo'}", f"out={place / 'out'}",
        f"paths.runs={place / 'runs'}", "smoke.engine=transformers", "smoke.probes=8",
        "tag=nightly",
    )  # fmt: skip
    (place / "elsewhere").mkdir()
    ran = subprocess.run(
        given, cwd=place / "elsewhere", env=one_thread(), timeout=500,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout
    assert not list((place / "elsewhere").iterdir())
    summary = json.loads((place / "runs" / "latest" / "summary.json").read_text())
    return Done(ran.returncode, ran.stdout, summary)


@pytest.fixture(scope="module")
def client(place: Path, done: Done) -> MlflowClient:
    return MlflowClient(f"sqlite:///{place / 'runs' / 'mlflow' / 'mlflow.db'}")


@pytest.fixture(scope="module")
def children(client: MlflowClient, done: Done) -> dict[str, Any]:
    """Return the tracked runs by stage."""
    parent = client.get_run(done.summary["mlflow_run_id"])
    query = f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    runs = client.search_runs([parent.info.experiment_id], query)
    return {run.data.tags["stage"]: run for run in runs}


def kept(client: MlflowClient, run: Any, name: str) -> Any:
    return json.loads(Path(client.download_artifacts(run.info.run_id, name)).read_text())


def test_prefect_has_the_flow_its_tasks_and_the_table(place: Path, done: Done) -> None:
    with sqlite3.connect(place / "runs" / "prefect" / "prefect.db") as database:
        flows = database.execute("select name, state_type, parameters from flow_run").fetchall()
        tasks = database.execute("select name, state_type from task_run").fetchall()
        tables = database.execute("select key, data from artifact").fetchall()
    assert [flow[:2] for flow in flows] == [("deliver-nightly", "COMPLETED")]
    assert f"source={place / 'ppo'}" in flows[0][2]
    assert {name.rpartition("-")[0] for name, _ in tasks} == set(STAGES)
    assert {state for _, state in tasks} == {"COMPLETED"}
    ((key, table),) = tables
    assert key == "deliver-checks"
    assert all(f"| {stage} |" in table for stage in STAGES)
    assert "audit, dealt with: " in table


def test_mlflow_has_the_run_and_its_summary(client: MlflowClient, done: Done) -> None:
    parent = client.get_run(done.summary["mlflow_run_id"])
    assert (parent.info.run_name, parent.info.status) == ("deliver ppo", "FINISHED")
    assert parent.data.tags["prefect.flow_run_id"]
    assert "| smoke_eval |" in parent.data.tags["mlflow.note.content"]
    assert kept(client, parent, "summary.json")["findings"] == done.summary["findings"]


def test_mlflow_has_the_findings(
    client: MlflowClient, children: dict[str, Any], done: Done
) -> None:
    assert set(children) == set(STAGES)
    audit = children["audit"]
    counts = {name: audit.data.metrics[f"audit/{name}"] for name in ("errors", "warnings", "infos")}
    assert counts["errors"] == 1
    assert sum(counts.values()) == len(done.summary["findings"])
    (stray,) = (
        finding
        for finding in kept(client, audit, "notes.json")["findings"]
        if finding["severity"] == "error"
    )
    assert stray["code"] == "STRAY_WEIGHT_FILE"
    assert "an artifact of its own" in stray["handled"]


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_its_verdicts_and_its_manifest(
    client: MlflowClient, children: dict[str, Any], stage: str
) -> None:
    run = children[stage]
    assert run.info.status == "FINISHED"
    manifest = kept(client, run, "manifest.json")
    assert manifest["digest"] == run.data.tags["digest"]
    verdicts = kept(client, run, "contract.json")
    assert run.data.metrics["contract/checked"] == len(verdicts)
    assert run.data.metrics["contract/failed"] == 0
    assert all(verdict["ok"] for verdict in verdicts)
    if stage in ("convert", "value_head"):
        assert len(verdicts) >= len(manifest["tensors"]) > 0


def test_the_served_artifact_is_the_tracked_one(
    children: dict[str, Any], place: Path, done: Done
) -> None:
    digest = json.loads((place / "out" / "manifest.json").read_text())["digest"]
    assert children["convert"].data.tags["digest"] == digest
    assert children["smoke_eval"].data.tags["input.served"] == digest
    assert children["smoke_eval"].data.metrics["drift/mean_kl"] < 1e-3
