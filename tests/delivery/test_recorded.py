"""A delivery's record in MLflow, its signature, and its push to a hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.delivery.conftest import Done
from tests.weights.heads.making import save_llamafactory

Run = Callable[..., Done]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_stage_is_tracked_with_its_findings_and_verdicts(deliver, tmp_path) -> None:
    from mlflow import MlflowClient

    save_llamafactory(tmp_path / "ppo", "qwen")
    words = [f"source={tmp_path / 'ppo'}", "smoke.probes=8"]
    done = deliver(*words, engine="transformers", timeout=500)
    client = MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow' / 'mlflow.db'}")
    parent = client.get_run(done.summary["mlflow_run_id"])
    query = f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    runs = client.search_runs([parent.info.experiment_id], query)
    stages = {run.data.tags["stage"]: run for run in runs}
    assert set(stages) == {"audit", "reference", "convert", "value_head", "smoke_eval"}

    def stored(run: Any, name: str) -> Any:
        return json.loads(Path(client.download_artifacts(run.info.run_id, name)).read_text())

    metrics = stages["audit"].data.metrics
    assert metrics["audit/errors"] == 1
    counts = [metrics[f"audit/{name}"] for name in ("errors", "warnings", "infos")]
    assert sum(counts) == len(done.summary["findings"])
    assert stored(parent, "summary.json")["findings"] == done.summary["findings"]
    for stage, run in stages.items():
        assert run.info.status == "FINISHED"
        manifest = stored(run, "manifest.json")
        assert manifest["digest"] == run.data.tags["digest"]
        verdicts = stored(run, "contract.json")
        assert run.data.metrics["contract/checked"] == len(verdicts)
        assert all(verdict["ok"] for verdict in verdicts)
        if stage in ("convert", "value_head"):
            assert len(verdicts) >= len(manifest["tensors"]) > 0
    digest = json.loads((tmp_path / "out" / "manifest.json").read_text())["digest"]
    assert stages["convert"].data.tags["digest"] == digest
    assert stages["smoke_eval"].data.tags["input.served"] == digest
