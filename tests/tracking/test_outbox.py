"""Outages of a real MLflow server: a run goes on, and nothing is doubled."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import TrackingError
from tasks.pipeline.artifact import Artifact, Origin
from tasks.tracking import outbox
from tasks.tracking.mlflow_server import RegisteredModel
from tasks.tracking.outbox import UnreachableError
from tasks.tracking.tracker import StageRun, Tracker
from tests.commands import mlflow_client
from tests.process.conftest import until
from tests.tracking.mlflow_process import MlflowProcess

ORIGIN = Origin("shards", "train", "k")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowProcess]:
    server = MlflowProcess(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


@pytest.fixture
def server(stored: MlflowProcess) -> MlflowProcess:
    stored.start()
    return stored


@pytest.fixture
def local(tmp_path: Path, database: str) -> Tracker:
    return Tracker(database, tmp_path.name, tmp_path / "files", tmp_path / "reports")


def model_in(folder: Path) -> RegisteredModel:
    return RegisteredModel("m", Artifact("served", folder, "digest"), "2026-03-01T10:00:00+00:00")


def log_steps(run: StageRun, steps: range) -> None:
    for step in steps:
        run.metrics({"train/loss": 100.0 - step, "train/lr": 0.1}, step)


def steps_of(client: Any, run_id: str) -> list[tuple[int, float]]:
    """Return (step, value) of the loss in the order of their times, which is that of logging."""
    history = client.get_metric_history(run_id, "train/loss")
    return [(m.step, m.value) for m in sorted(history, key=lambda m: (m.timestamp, m.step))]


def expected(steps: range) -> list[tuple[int, float]]:
    return [(step, 100.0 - step) for step in steps]


@pytest.mark.slow
def test_a_server_that_dies_and_comes_back_gets_every_step_once(
    server: MlflowProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker(server.uri, "back", None, tmp_path / "reports")
    with tracker.flow("f", {"a": 1}, "a: 1\n", {}) as parent:
        with tracker.stage("train", ORIGIN) as run:
            log_steps(run, range(5))
            until(lambda: run.run_id, 30)
            server.kill()
            log_steps(run, range(5, 10))
            until(lambda: "does not answer" in caplog.text, 30)
            log_steps(run, range(10, 15))
            server.start()
            log_steps(run, range(15, 20))
            run.text("note.txt", "here")
        until(lambda: tracker.settle() == "", 30)
    client = mlflow_client(server.uri)
    assert steps_of(client, run.run_id) == expected(range(20))
    assert [client.get_run(i).info.status for i in (parent, run.run_id)] == ["FINISHED"] * 2
    assert [file.path for file in client.list_artifacts(run.run_id)] == ["note.txt"]


@pytest.mark.slow
def test_an_interrupted_flow_does_not_wait_for_a_server_that_hangs(
    server: MlflowProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker(server.uri, "hangs", None, tmp_path / "reports")

    def interrupted() -> None:
        with tracker.flow("f", {}, "", {}), tracker.stage("train", ORIGIN) as run:
            until(lambda: run.run_id, 30)
            server.hang(stop=True)
            log_steps(run, range(5))
            time.sleep(outbox.POLL_S + 1)  # now a request is on its way
            log_steps(run, range(5, 10))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(tracker._outbox._waiting) > 10  # it still hangs, and has got no loss
    server.hang(stop=False)
    (warning,) = (line for line in caplog.messages if str(tmp_path / "reports") in line)
    assert server.uri in warning


def test_training_does_not_wait_for_a_server(
    local: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, answers = local._server.send, threading.Event()

    def hanging(*arguments: Any) -> None:
        assert answers.wait(60)
        send(*arguments)

    with local.flow("f", {}, "", {}), local.stage("train", ORIGIN) as run:
        monkeypatch.setattr(local._outbox, "_send", hanging)  # a flow's start waits for its id
        log_steps(run, range(10))
        answers.set()  # this line would not be reached
    assert local.settle() == ""
    assert steps_of(mlflow_client(local.uri), run.run_id) == expected(range(10))


def test_a_lost_answer_doubles_nothing(local: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request reaches MLflow, and the answer to every other one is lost."""
    monkeypatch.setattr(outbox, "PAUSE_S", 0.05)
    send, calls = local._server.send, iter(range(10**6))

    def losing(*arguments: Any) -> None:
        before = dict(arguments[1])
        send(*arguments)
        if next(calls) % 2 == 0:
            arguments[1].clear()
            arguments[1].update(before)
            raise UnreachableError("lost")

    monkeypatch.setattr(local._server, "send", losing)
    with local.flow("f", {}, "", {}) as parent, local.stage("train", ORIGIN) as run:
        log_steps(run, range(10))
        until(lambda: local.settle() == "", 30)
    client = mlflow_client(local.uri)
    assert steps_of(client, run.run_id) == expected(range(10))
    assert len(client.search_runs([local.experiment_id])) == 2
    assert parent == "" or client.get_run(parent)


def test_an_invalid_record_is_left_out_and_the_rest_arrives(
    local: Tracker, caplog: pytest.LogCaptureFixture
) -> None:
    with local.flow("f", {}, "", {}), local.stage("train", ORIGIN) as run:
        log_steps(run, range(2))
        run.tags({"k" * 500: "longer than MLflow allows"})
        log_steps(run, range(2, 4))
        assert "refused 1 records" in local.settle()
    assert steps_of(mlflow_client(local.uri), run.run_id) == expected(range(4))


def test_a_password_is_neither_logged_nor_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    uri = "http://me:s3cret@127.0.0.1:9"
    tracker = Tracker(uri, "secret", None, tmp_path / "reports")
    config = {"tracking": {"uri": uri}}
    with (
        tracker.flow("f", config, "", {}),
        tracker.stage("train", Origin("s", "t", "k", {}, config)),
    ):
        with pytest.raises(TrackingError) as error:
            tracker.register(model_in(tmp_path))
        report = tracker.settle()
    assert "http://me:***@127.0.0.1:9" in report
    for text in (report, caplog.text, error.value.report()):
        assert "s3cret" not in text
