"""The mechanism around a stage, with a real MLflow database."""

from __future__ import annotations

import logging
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tasks.core.contract import Check
from tasks.core.errors import ContractError, PlumblineError
from tasks.pipeline.stage import Mechanism, Stage, StageReport, StageResult
from tasks.process.launch import launch
from tasks.tracking.tracker import Tracker
from tests.commands import mlflow_client

LOG = logging.getLogger("tests.stage")
STAGE = Stage("write", "weights", stack=("torch", "not-installed"))


@pytest.fixture
def mechanism(tmp_path: Path, database: str) -> Mechanism:
    tracker = Tracker(database, tmp_path.name, tmp_path / "mlflow", tmp_path / "reports")
    return Mechanism(
        tmp_path / "artifacts", tmp_path / "logs", tracker, lambda _, work, __: work(LOG)
    )


def write(out: Path, *, text: str, log: object, ok: bool = True, **inputs: Path) -> StageReport:
    (out / "text.txt").write_text(text + "".join(sorted(inputs)))
    dtype = "BF16 [2]" if ok else "BF16 [0]"
    checks = (Check("t", "BF16 [2]", dtype, ok=ok, hint="look at t"),)
    return StageReport("weights", checks=checks, metrics={"n": len(text)}, notes={"text": text})


def run(mechanism: Mechanism, *texts: str, function=write, context=None) -> list[StageResult]:
    """Run stages in one flow; each reads what the one before wrote."""
    results: list[StageResult] = []
    with mechanism.tracker.flow("test", {"a": {"b": 1}}, "a: 1\n", {}):
        for text in texts:
            inputs = {"before": results[-1].artifact} if results else {}
            config = {"text": text}
            results.append(
                mechanism.run(STAGE, function, inputs=inputs, config=config, context=context)
            )
    return results


def test_the_same_inputs_and_configuration_are_run_once(mechanism: Mechanism) -> None:
    first = run(mechanism, "one", "two")
    again = run(mechanism, "one", "two")
    assert [r.reused for r in first] == [False, False]
    assert [r.reused for r in again] == [True, True]
    assert [r.artifact for r in again] == [r.artifact for r in first]
    assert again[0].checks == first[0].checks
    assert again[0].metrics == {"n": 3.0}


def test_what_another_run_has_made_meanwhile_is_reused(mechanism: Mechanism) -> None:
    """The second run wants the artifact while the first one makes it, and waits."""
    ready, theirs = threading.Event(), []

    def slow(out: Path, **arguments: Any) -> StageReport:
        ready.set()
        time.sleep(1)
        return write(out, **arguments)

    def second() -> None:
        ready.wait()
        theirs.append(mechanism.run(STAGE, write, inputs={}, config={"text": "one"}))

    thread = threading.Thread(target=second)
    with mechanism.tracker.flow("test", {}, "", {}):
        thread.start()
        ours = mechanism.run(STAGE, slow, inputs={}, config={"text": "one"})
        thread.join()
    assert [ours.reused, theirs[0].reused] == [False, True]
    assert theirs[0].artifact == ours.artifact


def test_what_changed_or_is_damaged_or_forced_runs_again(mechanism: Mechanism) -> None:
    first, _ = run(mechanism, "one", "two")
    assert [r.reused for r in run(mechanism, "ONE", "two")] == [False, False]
    text = first.artifact.path / "text.txt"
    text.write_text("ONE")
    (again,) = run(mechanism, "one")
    assert not again.reused
    assert text.read_text() == "one"
    shutil.rmtree(first.artifact.path)
    assert not run(mechanism, "one")[0].reused
    mechanism.force = frozenset({"write"})
    assert not run(mechanism, "one")[0].reused


def test_a_failed_check_publishes_nothing_and_names_hint_and_log(mechanism: Mechanism) -> None:
    mechanism.logs.mkdir()
    for name in ("reference.log", "write.log"):  # the scorer's; the stage's own goes first
        (mechanism.logs / name).write_text("")
        with pytest.raises(ContractError) as caught:
            run(mechanism, "one", context={"ok": False})
        lines = caught.value.report().splitlines()
        assert lines[-2:] == ["  -> look at t", f"  log: {mechanism.logs / name}"]
    assert not [p for p in mechanism.store.rglob("*") if p.is_file()]
    runs = runs_of(mechanism)
    assert {r.info.status for r in runs} == {"FAILED"}
    child = next(r for r in runs if r.data.tags.get("stage") == "write")
    assert child.data.metrics["contract/failed"] == 1


@pytest.mark.parametrize("limited", ["stage", "child"])
def test_a_time_limit_ends_the_children_and_says_what_to_type(
    mechanism: Mechanism, tmp_path: Path, limited: str
) -> None:
    started = tmp_path / "pid"
    sleeper = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid()))"

    def sleep(out: Path, **_: object) -> StageReport:
        argv = [sys.executable, "-c", f"{sleeper}; time.sleep(600)"]
        limit = None if limited == "stage" else 2.0
        launch(argv, stage="write", log=LOG, log_path=tmp_path / "log", timeout_s=limit)
        return StageReport("weights")

    mechanism.timeouts = {"write_s": 2.0 if limited == "stage" else None}
    with pytest.raises(PlumblineError) as caught:
        run(mechanism, "one", function=sleep)
    assert "  -> timeouts.write_s=<more seconds>" in caught.value.report()
    assert not (started.exists() and Path(f"/proc/{started.read_text()}").exists())
    assert {r.info.status for r in runs_of(mechanism)} == {"FAILED"}
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def runs_of(mechanism: Mechanism) -> list:
    client = mlflow_client(mechanism.tracker.uri)
    return client.search_runs([mechanism.tracker.experiment_id])


def test_the_key_follows_configuration_versions_and_sources(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert STAGE.key({"a": 1}, {}) == STAGE.key({"a": 1}, {})
    assert STAGE.key({"a": 1}, {}) != STAGE.key({"a": 2}, {})
    assert STAGE.versions()["not-installed"] == "absent"
    before = STAGE.key({}, {})
    monkeypatch.setattr("tasks.pipeline.stage.installed", lambda _: "9.9")
    assert STAGE.key({}, {}) != before
    monkeypatch.undo()
    monkeypatch.setattr("tasks.pipeline.stage.source_digest", lambda: "other sources")
    assert STAGE.key({}, {}) != before
