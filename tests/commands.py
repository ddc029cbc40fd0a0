"""Start a command of `flows/` as a user types it, or ranks of a test program."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.process.launch import launch, python_child
from tests.conftest import PROJECT


def command(program: str, *arguments: str) -> list[str]:
    """Return the command line of `flows/<program>.py`."""
    return [sys.executable, str(PROJECT / "flows" / f"{program}.py"), *arguments]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a user who has set up neither Prefect nor MLflow."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
    return inherited | {"COLUMNS": "160"} | more


def run_in_empty(
    cwd: Path, argv: Sequence[str], *, env: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a command in an empty folder, and check that it wrote nothing there."""
    done = subprocess.run(
        argv, cwd=cwd, env=env, timeout=timeout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    assert not list(cwd.iterdir()), "the command wrote into the user's directory"
    return done


def summary_of(runs: Path) -> dict[str, Any]:
    """Return the summary of the last run; empty if there is none."""
    latest = runs / "latest" / "summary.json"
    return json.loads(latest.read_text()) if latest.is_file() else {}


def run_ranks(
    module: str,
    *arguments: str,
    log_path: Path,
    ranks: int = 2,
    **env: str,
) -> None:
    """Run a module of `tests/` in ranks, with one thread each.

    Args:
        module: name of the module.
        arguments: its arguments.
        log_path: file for its output.
        ranks: number of ranks.
        env: additions to the environment.

    Raises:
        StageProcessError: a rank failed.
    """
    launch(
        python_child("tests.ranks", str(ranks), module, *arguments),
        stage="train",
        log=logging.getLogger("test"),
        log_path=log_path,
        env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **env},
    )


def mlflow_client(*uris: str) -> Any:
    """Return MLflow's own client of a tracking server, and of a registry if that is another."""
    from mlflow import MlflowClient

    return MlflowClient(*uris)


def tracked_run(runs: Path, flow_run: str) -> tuple[Any, Any]:
    """Return MLflow's client of a folder of runs, and its run of a flow run of Prefect."""
    client = mlflow_client(f"sqlite:///{runs / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("plumbline")
    query = f"tags.`prefect.flow_run_id` = '{flow_run}'"
    (tracked,) = client.search_runs([experiment.experiment_id], query)
    return client, tracked
