"""The tracker against a real database: owned runs, batched metrics, versions that point."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.pipeline.artifact import Artifact, Origin, publish, staging
from tasks.register import register
from tasks.release.gate import Gate, Verdict
from tasks.tracking.mlflow_server import EVALUATED_ON, NUMBERS, Registered, RegisteredModel
from tasks.tracking.tracker import Tracker
from tests.commands import mlflow_client


@pytest.fixture(scope="module")
def tracker(tmp_path_factory: pytest.TempPathFactory, database: str) -> Tracker:
    root = tmp_path_factory.mktemp("tracker")
    return Tracker(database, "plumbline", root / "artifacts", root / "reports")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Artifact]:
    origin = Origin(kind="served", stage="convert", key="k", notes={"drift": None})
    with staging(tmp_path / "served") as work:
        (work / "config.json").write_text("{}")
        yield publish(work, tmp_path / "served", origin)


def test_a_flow_that_raises_is_failed_one_that_is_killed_is_killed(tracker: Tracker) -> None:
    client = mlflow_client(tracker.uri)
    for error, status in ((ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")):
        with pytest.raises(error), tracker.flow("f", {}, "", {}) as run_id:
            raise error
        assert client.get_run(run_id).info.status == status


def test_metrics_arrive_with_their_steps_and_nan_is_left_out(tracker: Tracker) -> None:
    client = mlflow_client(tracker.uri)
    with tracker.flow("f", {}, "", {}), tracker.stage("train", Origin("shards", "train", "k")) as r:
        for step in range(5):
            r.metrics({"train/loss": 5.0 - step, "train/odd": float("nan")}, step)
    history = client.get_metric_history(r.run_id, "train/loss")
    assert [(m.step, m.value) for m in history] == [(step, 5.0 - step) for step in range(5)]
    assert "train/odd" not in client.get_run(r.run_id).data.metrics


def model_of(served: Artifact, name: str, trained_at: str) -> RegisteredModel:
    return RegisteredModel(name, served, f"{trained_at}T10:00:00+00:00", {"a": "b"}, "# A card")


def test_a_version_points_at_the_folder_and_is_the_candidate(
    tracker: Tracker, served: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow writes its URI to the environment: a sweep's next job would take it for its own."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "sqlite:///theirs.db")
    client = mlflow_client(tracker.uri, tracker.uri)
    with tracker.flow("f", {}, "", {}):
        before = dict(os.environ)
        model = model_of(served, "toy", "2026-03-01")
        registered = register(tracker, model, Gate())
        again = register(tracker, model, Gate())
        assert dict(os.environ) == before
    assert registered == again == Registered("models:/toy/1", "models:/toy/1")
    version = client.get_model_version_by_alias("toy", "candidate")
    assert version.version in (1, "1")
    assert version.tags["path"] == str(served.path)
    assert version.tags["digest"] == served.digest
    assert version.tags["a"] == "b"
    assert version.description == "# A card"


def test_the_candidate_is_the_version_trained_last_not_the_one_registered_last(
    tracker: Tracker, tmp_path: Path
) -> None:
    """An old configuration that is run again from the cache does not become the candidate."""
    client = mlflow_client(tracker.uri)
    folders = [Artifact("served", tmp_path / name, name) for name in ("old", "new", "oldest")]
    dates = ("2026-03-01", "2026-03-02", "2026-02-01")
    old, new, oldest = (model_of(f, "m", d) for f, d in zip(folders, dates, strict=True))
    with tracker.flow("f", {}, "", {}):
        seen = [tracker.register(model).candidate for model in (old, new, old, oldest)]
        assert seen == [f"models:/m/{number}" for number in (1, 2, 2, 2)]
        assert len(client.search_model_versions("name='m'")) == 3
        trained_again = model_of(folders[0], "m", "2026-03-03")
        assert tracker.register(trained_again) == Registered("models:/m/1", "models:/m/1")
        assert tracker.register(old).candidate == "models:/m/1"
    assert int(client.get_model_version_by_alias("m", "candidate").version) == 1


def test_only_a_model_that_passed_becomes_champion(tracker: Tracker, tmp_path: Path) -> None:
    client = mlflow_client(tracker.uri)
    first, second = (
        model_of(Artifact("served", tmp_path / name, name), "c", f"2026-03-0{day}")
        for day, name in enumerate(("first", "second"), 1)
    )
    first = replace(first, tags={NUMBERS: '{"eval.exact_match": 0.9}', EVALUATED_ON: "rows"})
    with tracker.flow("f", {}, "", {}):
        assert tracker.champion("c") is None
        passed = register(tracker, first, Gate(), promote=True)
        failed = register(tracker, second, Gate((Verdict("loss <= 1"),)), promote=True)
        champion = tracker.champion("c")
    assert passed == Registered("models:/c/1", "models:/c/1", "models:/c/1")
    assert failed == Registered("models:/c/2", "models:/c/2")
    assert champion is not None
    assert champion.name == "c/1"
    assert (champion.numbers, champion.rows) == ({"eval.exact_match": 0.9}, "rows")
    assert str(client.get_model_version_by_alias("c", "candidate").version) == "2"

    with tracker.flow("f", {}, "", {}):  # another evaluation of the same bytes
        again = replace(first, tags={NUMBERS: '{"eval.exact_match": 0.8}', EVALUATED_ON: "others"})
        assert tracker.register(again).version == "models:/c/1"
        champion = tracker.champion("c")
    assert champion is not None
    assert (champion.numbers, champion.rows) == ({"eval.exact_match": 0.8}, "others")


def test_the_flow_names_its_datasets_by_their_digest(tracker: Tracker, tmp_path: Path) -> None:
    config = {"kind": "jsonl", "path": "/data/chats.jsonl", "sources": []}
    notes = {"splits": {"train": {"kept": 90}, "heldout": {"kept": 10}}}
    origin = Origin("dataset", "prepare_data", "k", config=config, notes=notes)
    with staging(tmp_path / "data") as work:
        (work / "train.jsonl").write_text("{}")
        data = publish(work, tmp_path / "data", origin)
    with (
        tracker.flow("f", {}, "", {}) as parent,
        tracker.stage("prepare_data", origin) as stage,
    ):
        stage.finish(data, {}, reused=False)
    (logged,) = mlflow_client(tracker.uri).get_run(parent).inputs.dataset_inputs
    assert (logged.dataset.name, logged.dataset.digest) == ("chats.jsonl", data.digest[:36])
    assert json.loads(logged.dataset.source)["digest"] == data.digest
    assert json.loads(logged.dataset.profile) == {"train_rows": 90, "heldout_rows": 10}
