"""Sections `tracking` and `paths`: where things go."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Tracking:
    """MLflow."""

    uri: str | None = None  # null: SQLite under paths.runs
    experiment: str = "plumbline"  # MLflow experiment of the runs
    model_name: str = "plumbline"  # in the model registry
    tensorboard: bool = False  # event files under paths.runs/tensorboard too


@dataclass
class Paths:
    """Where things go."""

    runs: str = "runs"  # folder for artifacts, MLflow, Prefect and logs
    wait_s: float = 0.0  # how long to wait for another run in the same folder
