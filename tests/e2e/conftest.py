"""The program as a user runs it: the literal command, from another working directory.

And what it leaves: living processes, and the records in MLflow, read with MLflow's own client.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.commands import command, environment, mlflow_client, run_in_empty, summary_of

SHORT = (
    "+exp=sft_qlora", "model.steps=60", "train.max_steps=8", "train.save_steps=4",
    "smoke.eval_samples=8",
)  # fmt: skip
"""The README's experiment with few steps: every hand-off is judged as at full length."""


@dataclass(frozen=True)
class Run:
    """A finished command and what it left. `summary` is its own: `latest` moves on."""

    code: int
    output: str
    runs: Path
    summary: dict[str, Any]

    def stage(self, name: str) -> dict[str, Any]:
        (entry,) = [s for s in self.summary["stages"] if s["name"] == name]
        return entry

    def artifact(self, stage: str) -> Path:
        """Return the folder that a stage made."""
        return Path(self.stage(stage)["artifact"])


def living(runs: Path) -> list[str]:
    """Return the command lines of living processes that name this folder of runs."""
    processes = psutil.process_iter(["cmdline"])
    lines = (" ".join(process.info["cmdline"] or ()) for process in processes)
    return [line for line in lines if str(runs) in line]


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


@pytest.fixture(scope="session")
def rlhf(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Run `python /elsewhere/flows/rlhf.py OVERRIDES paths.runs=RUNS` in an empty directory."""
    cwd = tmp_path_factory.mktemp("elsewhere")

    def run(runs: Path, *overrides: str, timeout: float = 1140) -> Run:
        argv = command("rlhf", *overrides, f"paths.runs={runs}")
        done = run_in_empty(cwd, argv, env=environment(), timeout=timeout)
        return Run(done.returncode, done.stdout, runs, summary_of(runs))

    return run


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder with a blank in its name for all commands, so that they share the toy base."""
    return tmp_path_factory.mktemp("plumb line") / "runs"


@pytest.fixture(scope="session")
def chain(rlhf: Callable[..., Run], runs: Path) -> Run:
    """The short chain from an empty folder: Prefect, MLflow, two ranks, the scorer, vLLM."""
    return rlhf(runs, *SHORT)
