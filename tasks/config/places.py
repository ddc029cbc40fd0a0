"""Sections `tracking` and `paths`: where results are recorded and stored."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tracking:
    """MLflow."""

    uri: str | None = None  # null: SQLite under paths.runs
    experiment: str = "plumbline"  # MLflow experiment of the runs
    model_name: str = "plumbline"  # in the model registry
    tensorboard: bool = False  # write event files under paths.runs/tensorboard too


@dataclass(frozen=True)
class Paths:
    """Folders."""

    runs: str = "runs"  # folder for artifacts, MLflow, Prefect and logs
    wait_s: float = 0.0  # seconds to wait for another run in the same folder
