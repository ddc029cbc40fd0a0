"""Read the MLflow records of a finished command with MLflow's own client."""

from __future__ import annotations

from typing import Any

from tests.commands import mlflow_client
from tests.e2e.conftest import Run


def client(run: Run) -> Any:
    return mlflow_client(f"sqlite:///{run.runs}/mlflow/mlflow.db")


def children(run: Run) -> dict[str, Any]:
    """Return the MLflow runs of the stages, by stage."""
    tracker, parent = client(run), run.summary["mlflow_run_id"]
    experiment = tracker.get_run(parent).info.experiment_id
    runs = tracker.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent}'")
    return {child.data.tags["stage"]: child for child in runs}


def curve(run: Run, name: str, *, stage: str = "train") -> list[float]:
    """Return the values of a training metric, by step."""
    history = client(run).get_metric_history(children(run)[stage].info.run_id, name)
    return [metric.value for metric in sorted(history, key=lambda metric: metric.step)]
