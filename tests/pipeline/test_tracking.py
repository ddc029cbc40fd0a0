"""The tracker against a real database: owned runs, batched metrics, versions that point."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tasks.core.errors import ContractError
from tasks.pipeline.artifact import Artifact, Origin, publish, staging
from tasks.pipeline.tracking import Tracker, flatten
from tasks.register import Gate, judge_gate, register


@pytest.fixture(scope="module")
def tracker(tmp_path_factory: pytest.TempPathFactory) -> Tracker:
    root = tmp_path_factory.mktemp("mlflow")
    return Tracker(f"sqlite:///{root}/mlflow.db", "plumbline", root / "artifacts", root / "outbox")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Artifact]:
    origin = Origin(kind="served", stage="convert", key="k", notes={"drift": None})
    with staging(tmp_path / "served") as work:
        (work / "config.json").write_text("{}")
        yield publish(work, tmp_path / "served", origin)


def test_parameters_are_flat_and_passwords_do_not_leave() -> None:
    assert flatten({"train": {"lr": 1e-4, "betas": [0.9, 0.95]}, "tag": None}) == {
        "train.lr": "0.0001",
        "train.betas": "[0.9, 0.95]",
        "tag": "None",
    }
    assert flatten({"uri": "http://me:secret@h"}) == {"uri": "http://me:***@h"}


def test_a_flow_that_raises_is_failed_one_that_is_killed_is_killed(tracker: Tracker) -> None:
    client = MlflowClient(tracker.uri)
    for error, status in ((ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")):
        with pytest.raises(error), tracker.flow("f", {}, "", {}) as run_id:
            raise error
        assert client.get_run(run_id).info.status == status


def test_metrics_arrive_with_their_steps_and_nan_is_left_out(tracker: Tracker) -> None:
    client = MlflowClient(tracker.uri)
    with tracker.flow("f", {}, "", {}), tracker.stage("train", Origin("shards", "train", "k")) as r:
        for step in range(5):
            r.metrics({"train/loss": 5.0 - step, "train/odd": float("nan")}, step)
    history = client.get_metric_history(r.run_id, "train/loss")
    assert [(m.step, m.value) for m in history] == [
        (0, 5.0),
        (1, 4.0),
        (2, 3.0),
        (3, 2.0),
        (4, 1.0),
    ]
    assert "train/odd" not in client.get_run(r.run_id).data.metrics


def test_a_version_points_at_the_folder_and_the_alias_moves(
    tracker: Tracker, served: Artifact
) -> None:
    client = MlflowClient(tracker.uri)
    with tracker.flow("f", {}, "", {}):
        args = {
            "served": served,
            "gate": Gate(passed=True),
            "model_name": "toy",
            "tags": {"a": "b"},
        }
        name = register(tracker, **args)
        again = register(tracker, **args)
    assert name == again == "models:/toy/1"
    version = client.get_model_version_by_alias("toy", "candidate")
    assert version.version in (1, "1")
    assert version.tags["path"] == str(served.path)
    assert version.tags["digest"] == served.digest
    assert version.tags["a"] == "b"


def test_registering_leaves_the_environment_as_it_was(
    tracker: Tracker, served: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow writes the URI there, and the next job of a sweep would take it for its own."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "sqlite:///theirs.db")
    with tracker.flow("f", {}, "", {}):
        before = dict(os.environ)
        register(tracker, served=served, gate=Gate(passed=True), model_name="env", tags={})
    assert dict(os.environ) == before


def test_the_gate_registers_nothing_when_it_does_not_hold(served: Artifact) -> None:
    gate = judge_gate({"eval/before": 0.5, "eval/after": 0.6}, min_eval_gain=20)
    assert gate == Gate(False, ("exact-match rose by 10.0 points, gate asks 20",))
    with pytest.raises(ContractError, match="rose by 10.0 points"):
        register(None, served=served, gate=gate, model_name="m", tags={})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("metrics", "minimum", "passed"),
    [
        ({}, None, True),
        ({}, 0.0, False),
        ({"eval/before": 0.5, "eval/after": 0.5}, 0.0, True),
        ({"eval/before": 0.5, "eval/after": 0.7}, 20.0, True),
        ({"eval/before": 0.5, "eval/after": 0.69}, 20.0, False),
    ],
)
def test_gate(metrics: dict[str, float], minimum: float | None, passed: bool) -> None:
    assert judge_gate(metrics, min_eval_gain=minimum).passed is passed


def test_event_files_hold_the_numbers_that_mlflow_has(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "tensorboard"
    database, outbox = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "outbox"
    tracker = Tracker(database, "plumbline", tmp_path / "files", outbox, folder)
    with tracker.flow("f", {}, "", {}) as run_id:
        with tracker.stage("train", Origin("shards", "train", "k")) as run:
            for step in (1, 2):
                run.metrics({"train/loss": 3.0 - step, "train/odd": float("nan")}, step)
        with tracker.stage("gather", Origin("adapter", "gather", "k")):
            pass
    assert [path.name for path in (folder / run_id).iterdir()] == ["train"]
    read = EventAccumulator(str(folder / run_id / "train"))
    read.Reload()
    assert read.Tags()["scalars"] == ["train/loss"]
    assert [(e.step, e.value) for e in read.Scalars("train/loss")] == [(1, 2.0), (2, 1.0)]


def test_a_long_description_is_cut_between_lines_and_says_so(
    tracker: Tracker, caplog: pytest.LogCaptureFixture
) -> None:
    text = "\n".join(f"line {number}" for number in range(2000))
    with tracker.flow("f", {}, "", {}) as run_id:
        tracker.log_parent({}, {"report.txt": text}, text)
    note = MlflowClient(tracker.uri).get_run(run_id).data.tags["mlflow.note.content"]
    *lines, _, last = note.rstrip("\n").split("\n")
    assert lines == text.split("\n")[: len(lines)]
    assert len(lines) > 700
    assert last == "... and more, in the artifacts of this run"
    assert "truncated" not in caplog.text
