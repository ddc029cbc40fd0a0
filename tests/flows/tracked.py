"""What a finished command left in MLflow, read by MLflow's own client."""

from __future__ import annotations

from typing import Any

from mlflow import MlflowClient

from tests.flows.conftest import Run


def client(run: Run) -> MlflowClient:
    return MlflowClient(f"sqlite:///{run.runs}/mlflow/mlflow.db")


def children(run: Run) -> dict[str, Any]:
    """The tracked runs of the command's stages, by stage."""
    tracker, parent = client(run), run.summary["mlflow_run_id"]
    experiment = tracker.get_run(parent).info.experiment_id
    found = tracker.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent}'")
    return {child.data.tags["stage"]: child for child in found}


def curve(run: Run, name: str, *, stage: str = "train") -> list[float]:
    """The values of a metric of training, by step."""
    history = client(run).get_metric_history(children(run)[stage].info.run_id, name)
    return [one.value for one in sorted(history, key=lambda one: one.step)]
