"""Outages of a real MLflow server, and flows that are killed: nothing is lost or doubled."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tasks.core.errors import TrackingError
from tasks.pipeline.artifact import Artifact, Origin
from tasks.pipeline.report import RegisteredModel
from tasks.tracking import outbox
from tasks.tracking.journal import Journal, left_behind, new_journal, now
from tasks.tracking.outbox import Outbox, UnreachableError
from tasks.tracking.tracker import StageRun, Tracker
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
def local(tmp_path: Path) -> Tracker:
    database = f"sqlite:///{tmp_path}/mlflow.db"
    return Tracker(database, "outbox", tmp_path / "files", tmp_path / "outbox")


def model_in(folder: Path) -> RegisteredModel:
    return RegisteredModel("m", Artifact("served", folder, "digest"), "2026-03-01T10:00:00+00:00")


def log_steps(run: StageRun, steps: range) -> None:
    for step in steps:
        started = time.monotonic()
        run.metrics({"train/loss": 100.0 - step, "train/lr": 0.1}, step)
        assert time.monotonic() - started < 1


def steps_of(client: MlflowClient, run_id: str) -> list[tuple[int, float]]:
    """Return (step, value) of the loss in the order of their times, which is that of logging."""
    history = client.get_metric_history(run_id, "train/loss")
    return [(m.step, m.value) for m in sorted(history, key=lambda m: (m.timestamp, m.step))]


def children(client: MlflowClient, tracker: Tracker, parent: str) -> Any:
    text = f"tags.`mlflow.parentRunId` = '{parent}'"
    return client.search_runs([tracker.experiment_id], text)


def expected(steps: range) -> list[tuple[int, float]]:
    return [(step, 100.0 - step) for step in steps]


def until(condition: Any, limit_s: float = 30) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_a_server_that_dies_and_comes_back_gets_every_step_once(
    server: MlflowProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker(server.uri, "back", None, tmp_path / "outbox")
    with tracker.flow("f", {"a": 1}, "a: 1\n", {}) as parent:
        with tracker.stage("train", ORIGIN) as run:
            log_steps(run, range(5))
            until(lambda: run.run_id)
            server.kill()
            log_steps(run, range(5, 10))
            until(lambda: "does not answer" in caplog.text)
            log_steps(run, range(10, 15))
            server.start()
            until(lambda: "answers again" in caplog.text)
            log_steps(run, range(15, 20))
            run.text("note.txt", "here")
        assert tracker.settle() == ""
    client = MlflowClient(server.uri)
    assert steps_of(client, run.run_id) == expected(range(20))
    assert [client.get_run(i).info.status for i in (parent, run.run_id)] == ["FINISHED"] * 2
    assert [file.path for file in client.list_artifacts(run.run_id)] == ["note.txt"]
    assert list((tmp_path / "outbox").iterdir()) == []


@pytest.mark.slow
def test_an_interrupted_flow_does_not_wait_for_a_server_that_hangs(
    server: MlflowProcess, tmp_path: Path
) -> None:
    tracker = Tracker(server.uri, "hangs", None, tmp_path / "outbox")
    began: list[float] = []
    runs: list[str] = []

    def interrupted() -> None:
        with tracker.flow("f", {}, "", {}) as parent, tracker.stage("train", ORIGIN) as run:
            until(lambda: run.run_id)
            runs.extend((parent, run.run_id))
            server.hang(stop=True)
            log_steps(run, range(5))
            time.sleep(outbox.POLL_S + 1)  # now a request is on its way
            log_steps(run, range(5, 10))
            began.append(time.monotonic())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - began[0] < 10
    server.hang(stop=False)
    time.sleep(outbox.PAUSE_S)
    with Tracker(server.uri, "hangs", None, tmp_path / "outbox").flow("after", {}, "", {}):
        pass
    client = MlflowClient(server.uri)
    assert [client.get_run(run).info.status for run in runs] == ["KILLED", "KILLED"]
    assert steps_of(client, runs[1]) == expected(range(10))


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
        until(lambda: local.settle() == "")
    client = MlflowClient(local.uri)
    assert steps_of(client, run.run_id) == expected(range(10))
    assert len(client.search_runs([local.experiment_id])) == 2
    assert parent == "" or client.get_run(parent)


KILLED = """
import sys, time
from pathlib import Path
from tasks.pipeline.artifact import Origin
from tasks.pipeline.report import RegisteredModel
from tasks.tracking.tracker import Tracker
root = Path(sys.argv[1])
tracker = Tracker(f"sqlite:///{root}/mlflow.db", "outbox", root / "files", root / "outbox")
with tracker.flow("killed", {}, "", {}) as parent:
    with tracker.stage("train", Origin("shards", "train", "k")) as run:
        for step in range(5):
            run.metrics({"train/loss": 100.0 - step}, step)
        print(parent, flush=True)
        time.sleep(600)
"""


def test_runs_of_a_killed_flow_end_as_killed_and_those_of_a_living_one_go_on(
    local: Tracker, tmp_path: Path
) -> None:
    argv = [sys.executable, "-c", KILLED, str(tmp_path)]
    client = MlflowClient(local.uri)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        parent = process.stdout.readline().strip()
        try:
            with local.flow("beside", {}, "", {}):
                pass
            assert client.get_run(parent).info.status == "RUNNING"
        finally:
            process.send_signal(signal.SIGKILL)
    with local.flow("after", {}, "", {}):
        pass
    (child,) = children(client, local, parent)
    assert client.get_run(parent).info.status == child.info.status == "KILLED"
    assert steps_of(client, child.info.run_id) == expected(range(5))
    assert list((tmp_path / "outbox").iterdir()) == []


def test_an_invalid_record_is_left_out_and_the_rest_arrives(
    local: Tracker, caplog: pytest.LogCaptureFixture
) -> None:
    with local.flow("f", {}, "", {}), local.stage("train", ORIGIN) as run:
        log_steps(run, range(2))
        run.tags({"k" * 500: "longer than MLflow allows"})
        log_steps(run, range(2, 4))
        assert "refused 1 records" in local.settle()
    assert steps_of(MlflowClient(local.uri), run.run_id) == expected(range(4))


def test_a_password_is_neither_logged_nor_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    uri = "http://me:s3cret@127.0.0.1:9"
    tracker = Tracker(uri, "secret", None, tmp_path / "outbox")
    config = {"tracking": {"uri": uri}}
    with (
        tracker.flow("f", config, "", {}),
        tracker.stage("train", Origin("s", "t", "k", {}, config)),
    ):
        with pytest.raises(TrackingError) as error:
            tracker.register(model_in(tmp_path))
        report = tracker.settle()
    kept = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "http://me:***@127.0.0.1:9" in kept
    assert "http://me:***@127.0.0.1:9" in report
    for text in (kept, report, caplog.text, error.value.report()):
        assert "s3cret" not in text


def metrics(step: int, count: int = 1) -> dict[str, object]:
    values = {f"m{number}": 1.0 for number in range(count)}
    return {"do": "metrics", "run": "a", "values": values, "step": step, "at": step}


def test_half_a_record_is_dropped_and_open_runs_end_as_killed(tmp_path: Path) -> None:
    dead, last = new_journal(tmp_path, "there"), now() + 7
    with pytest.raises(BlockingIOError):
        Journal(dead.folder)
    assert list(left_behind(tmp_path, "there")) == [], "a journal has one owner"
    for run in ("parent", "child", "done"):
        dead.append({"do": "start", "run": run, "at": 1})
    dead.append({"do": "end", "run": "done", "status": "FINISHED", "at": last})
    dead._file.write(b'{"do": "metr')
    dead._file.close()
    (journal,) = left_behind(tmp_path, "there")
    records = [record for record, _ in journal.records()]
    ends = [(r["run"], r["status"]) for r in records if r["do"] == "end" and r["at"] == last]
    assert ends == [("done", "FINISHED"), ("child", "KILLED"), ("parent", "KILLED")]
    journal.delivered(journal._path.stat().st_size)
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_loses_records_and_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Outbox(tmp_path, "there", lambda records, runs, folder: None)
    kept._journal._file.close()
    kept._journal._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    for step in range(3):
        kept.put(**metrics(step))
    assert caplog.text.count("No space left on device") == 1
    assert kept.report()
    kept.close(10)


def test_a_record_of_another_thread_is_no_missing_delivery(tmp_path: Path) -> None:
    """The machine's load is sampled meanwhile; the model would not be registered."""

    def send(batch: list[Any], runs: dict[str, str], folder: Path) -> None:
        if batch[0]["do"] == "tags":
            box.put(do="metrics", run="r", values={"cpu": 1.0}, step=0, at=1)

    box = Outbox(tmp_path, "here", send)
    box.put(do="tags", run="r", tags={})
    assert box.wait(10)
    box.close(10)
