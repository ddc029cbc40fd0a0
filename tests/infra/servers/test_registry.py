"""The deployments `deliver` and `audit-registry`, with a real worker and a real MLflow server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from mlflow import MlflowClient

from tasks.pipeline.artifact import Artifact, Origin, publish
from tasks.pipeline.report import RegisteredModel
from tasks.tracking.mlflow_server import Server
from tests.audit.making import make_model
from tests.infra.servers.conftest import Site


@pytest.fixture
def registered(site: Site) -> list[Artifact]:
    """Two versions of a model, of which the second is `candidate`, and one of another program."""
    server = Server(site.services.mlflow_url, None)
    client = MlflowClient(site.services.mlflow_url, site.services.mlflow_url)
    run = client.create_run(server.experiment_id("plumbline"))
    artifacts = []
    for seed in (1, 2):
        place = site.services.runs / "artifacts" / "served"
        work = make_model(place / f".work{seed}", bos_token_id=seed)
        key = f"key{seed}"
        artifacts.append(publish(work, place / key, Origin("served", "convert", key)))
        model = RegisteredModel("plumbline", artifacts[-1], f"2026-03-0{seed}T10:00:00+00:00")
        server.register(model, run.info.run_id, "plumbline")
    client.create_registered_model("elsewhere")
    client.create_model_version("elsewhere", "s3://elsewhere/model")
    return artifacts


def table(site: Site, run_id: str) -> list[dict[str, Any]]:
    """Return the rows of the only table of a flow run."""
    query = {"artifacts": {"flow_run_id": {"any_": [run_id]}, "key": {"like_": "audit-registry"}}}
    (artifact,) = site.services.request("POST", "/artifacts/filter", query)
    assert artifact["type"] == "table"
    rows: list[dict[str, Any]] = json.loads(artifact["data"])
    return rows


@pytest.mark.slow
def test_the_registry_is_audited(site: Site, registered: list[Artifact]) -> None:
    """A byte that changes on the disk of a registered model fails the weekly audit."""
    run = site.finished_run(site.start_run("audit-registry", []))
    assert run["state_type"] == "COMPLETED", run["state"]
    (row,) = table(site, run["id"])
    assert row.pop("warnings") >= 0
    folder = str(registered[1].path)
    assert row == {
        "version": "plumbline/2", "aliases": "candidate", "folder": folder, "errors": 0,
        "problem": "",
    }  # fmt: skip
    site.logged(run["id"], "1 of 3 registered versions audited")

    weights = registered[1].path / "model.safetensors"
    weights.chmod(0o644)
    with weights.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    run = site.finished_run(site.start_run("audit-registry", []))
    assert run["state_type"] == "FAILED", run["state"]
    (row,) = table(site, run["id"])
    assert row["errors"] >= 1
    assert "tensor" in row["problem"]
    assert "plumbline/2" in run["state"]["message"]
    assert "->" in run["state"]["message"]
