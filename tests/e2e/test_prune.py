"""`flows/prune.py` as a user types it: on small stores, and on the folder of a real run."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.pipeline.artifact import Artifact, Origin, open_artifact, publish, staging, verify
from tasks.tracking.mlflow_server import RegisteredModel
from tasks.tracking.tracker import Tracker
from tests.commands import command, environment, mlflow_client, run_in_empty
from tests.e2e.conftest import SHORT, Run

LONG_AGO = time.time() - 100 * 86400


def prune(runs: Path, cwd: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    cwd.mkdir(exist_ok=True)
    argv = command("prune", *overrides, f"paths.runs={runs}")
    return run_in_empty(cwd, argv, env=environment(), timeout=120)


def make(runs: Path, kind: str, key: str, **inputs: Artifact) -> Artifact:
    final = runs / "artifacts" / kind / (key * 20)
    digests = {role: artifact.digest for role, artifact in inputs.items()}
    with staging(final) as work:
        (work / "text.txt").write_text(key * 1000)
        made = publish(work, final, Origin(kind, kind, key * 20, digests))
    os.utime(made.path / "manifest.json", (LONG_AGO, LONG_AGO))
    return made


@pytest.fixture
def folder(tmp_path: Path, empty_database: Path) -> Path:
    """Two served models with their weights; MLflow knows the first one."""
    runs = tmp_path / "runs"
    ours = make(runs, "served", "a", weights=make(runs, "weights", "b"))
    make(runs, "served", "c", weights=make(runs, "weights", "d"))
    store = runs / "mlflow"
    store.mkdir()
    shutil.copy(empty_database, store)
    tracker = Tracker(f"sqlite:///{store}/mlflow.db", "e", store / "artifacts", store / "reports")
    with tracker.flow("test", {}, "", {}):
        model = RegisteredModel("plumbline", ours, "2026-03-01T10:00:00+00:00")
        assert tracker.register(model).version == "models:/plumbline/1"
    return runs


def present(runs: Path) -> set[str]:
    return {path.name[0] for path in (runs / "artifacts").glob("[!.]*/[!.]*")}


def test_nothing_is_removed_without_yes(folder: Path, tmp_path: Path) -> None:
    shown = prune(folder, tmp_path / "cwd", "older_than=30")
    assert shown.returncode == 0, shown.stdout
    assert "remove: 2 folders" in shown.stdout
    assert "keep: 2 artifacts (2 registered models)" in shown.stdout
    assert str(folder / "artifacts" / "served" / ("c" * 20)) in shown.stdout
    assert "add yes=true" in shown.stdout
    assert present(folder) == set("abcd")
    done = prune(folder, tmp_path / "cwd", "older_than=30", "yes=true")
    assert done.returncode == 0, done.stdout
    assert present(folder) == set("ab")
    assert list(folder.rglob("*.pruned")) == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_after_a_prune_the_same_command_reuses_and_the_model_loads(
    chain: Run, rlhf: Callable[..., Run], tmp_path: Path
) -> None:
    """The folder of a real run, moved: MLflow still has the old path."""
    runs = tmp_path / "runs"
    shutil.copytree(chain.runs, runs, symlinks=True)
    failed = rlhf(runs, *SHORT, "train.lr=1e-4", "gate.min_eval_gain=99")
    assert failed.code == 1, failed.output
    before = set((runs / "artifacts").glob("[!.]*/[!.]*"))

    kept = prune(runs, tmp_path / "cwd", "keep=0", "yes=true")
    assert kept.returncode == 0, kept.stdout
    assert set((runs / "artifacts").glob("[!.]*/[!.]*")) == before  # the failed run may go on

    # It is a candidate until somebody deletes it.
    candidate = failed.summary["gate"]["candidate"].rpartition("/")[2]
    database = f"sqlite:///{runs}/mlflow/mlflow.db"
    mlflow_client(database).delete_model_version("plumbline", candidate)
    done = prune(runs, tmp_path / "cwd", "keep=0", "unfinished=true", "yes=true")
    assert done.returncode == 0, done.stdout
    left = set((runs / "artifacts").glob("[!.]*/[!.]*"))
    assert left < before
    stages = [stage for stage in chain.summary["stages"] if stage["name"] != "register"]
    assert {path.name for path in left} == {Path(stage["artifact"]).name for stage in stages}
    assert all(verify(open_artifact(path)) == [] for path in left)

    again = rlhf(runs, *SHORT)
    assert again.code == 0, again.output
    assert all(stage["reused"] for stage in again.summary["stages"][:-1])
    version = mlflow_client(database).get_model_version_by_alias("plumbline", "candidate")
    served = Path(version.tags["path"])
    assert verify(open_artifact(served)) == []
    assert served == Path(again.summary["served"])

    rebuilt = rlhf(runs, *SHORT, "train.lr=1e-4")
    assert rebuilt.code == 0, rebuilt.output
    reused = {s["name"]: s["reused"] for s in rebuilt.summary["stages"]}
    assert reused["prepare_base"]
    assert not reused["train"]
