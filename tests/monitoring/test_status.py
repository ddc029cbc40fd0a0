"""`python flows/status.py`: what runs and what ran, from files alone."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefect.exceptions import TerminationSignal

from flows.cli.config import compose_config
from flows.cli.entry import HUNG_UP, TERMINATED
from flows.commands.status import _document, _row
from flows.delivery.run_delivery import Untracked
from flows.monitoring import run_record
from flows.monitoring.prometheus import MetricsFile
from flows.monitoring.run_history import history
from flows.orchestration.flow_run import FlowRun, in_this_process
from tests.conftest import PROJECT
from tests.monitoring.records import document, ended, record_at, status, write

RUNNING = """
import sys, time
from pathlib import Path
from tests.monitoring.records import STEP, record_at, result
with record_at(Path(sys.argv[1])) as record:
    record.call("prepare_base", lambda log: result("prepare_base"), {})
    with record.stage("train"):
        record.on_event({"event": "plan", "steps": 40})
        record.on_event(STEP)
        record._write()
        print("ready", flush=True)
        time.sleep(600)
"""


def test_a_run_in_progress_and_after_kill_9(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", RUNNING, str(tmp_path)]
    with subprocess.Popen(argv, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        (state,) = history(tmp_path)
        process.kill()
    running = _document(state)
    assert running["state"] == "running"
    assert (running["stage"], running["step"], running["steps"]) == ("train", 12, 40)
    assert running["numbers"]["loss"] == 0.5
    assert running["pid"] == process.pid
    assert running["exit_status"] is None
    assert [stage["name"] for stage in running["stages"]] == ["prepare_base", "train"]
    (state,) = history(tmp_path)
    assert state.state == "lost"


def test_every_way_to_end(tmp_path: Path) -> None:
    ended(tmp_path, "20261123-100000-aaaaaaaa", "completed")
    ended(tmp_path, "20261123-110000-bbbbbbbb", "failed", error="the loss is \x1b[31mnot finite")
    ended(tmp_path, "20261123-120000-cccccccc", "cancelled", flow="deliver")
    table = status(tmp_path)
    rows = {line.split()[2]: line for line in table.splitlines()[1:4]}
    assert list(rows) == ["cccccccc", "bbbbbbbb", "aaaaaaaa"]  # newest first
    assert "completed (0)" in rows["aaaaaaaa"]
    assert "loss 0.5" in rows["aaaaaaaa"]
    assert "1,234" in rows["aaaaaaaa"]
    assert "failed (1)" in rows["bbbbbbbb"]
    assert "train 12/40" in rows["bbbbbbbb"]
    assert "cancelled (130)" in rows["cccccccc"]
    assert "bbbbbbbb  the loss is not finite" in table
    (newest,) = json.loads(status(tmp_path, "json=true", "limit=1"))
    assert (newest["state"], newest["exit_status"]) == ("cancelled", 130)


@pytest.mark.parametrize(
    ("error", "state", "status"),
    [
        (None, "completed", 0),
        (ValueError("no"), "failed", 1),
        (KeyboardInterrupt(HUNG_UP), "cancelled", 129),
        (SystemExit(TERMINATED), "cancelled", 143),
        (TerminationSignal(signal=15), "cancelled", 143),
    ],
    ids=repr,
)
def test_exit_status(tmp_path: Path, error: BaseException | None, state: str, status: int) -> None:
    """Exceptions that the handlers of the command line raise reach the summary of a flow."""
    composed = compose_config(["+exp=sft_qlora", f"paths.runs={tmp_path}"])
    host = in_this_process("0a1b2c3d", logging.getLogger("test"))
    flow_run = FlowRun.begin("rlhf", composed, host, tracker=Untracked(), exp="sft_qlora")

    def stages(_: FlowRun) -> None:
        assert history(tmp_path)[0].state == "running"
        if error is not None:
            raise error

    with pytest.raises(type(error)) if error else contextlib.nullcontext():
        flow_run.run("title", stages)
    (run,) = history(tmp_path)
    assert (run.state, run.exit_status, run.exp) == (state, status, "sft_qlora")


def test_a_run_on_another_machine(tmp_path: Path) -> None:
    """The lock of such a run is not seen here, so that its last record decides."""
    for number, (silent_s, state) in enumerate(((20, "running"), (600, "lost"))):
        runs = tmp_path / str(number)
        record = document(host="another-node", written=time.time() - silent_s)
        write(runs, "20261123-140000-0a1b2c3d", record)
        assert [(run.state, run.host) for run in history(runs)] == [(state, "another-node")]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
KEYS = ("started", "written", "host", "flow", "exp", "pid", "stages", "status", "seconds", "error")
STAGE_KEYS = ("name", "seconds", "started", "step", "steps", "step_at", "seconds_per_step")


@settings(max_examples=40)
@given(
    cut=st.integers(0, 700),
    changes=st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=4),
    stage=st.dictionaries(st.sampled_from((*STAGE_KEYS, "numbers")), ANYTHING, max_size=4),
    raw=st.binary(max_size=20),
)
def test_no_file_ends_in_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, cut: int, changes: dict[str, Any],
    stage: dict[str, Any], raw: bytes,
) -> None:  # fmt: skip
    """Cut off, altered, or not JSON at all; of the record and of the summary."""
    runs = tmp_path_factory.mktemp("runs")
    record = document()
    record["stages"][0] |= stage
    texts = [json.dumps(record | changes), json.dumps(record)[:cut]]
    for number, text in enumerate([*texts, json.dumps({"status": "failed", **changes})]):
        folder = write(runs, f"20261123-14000{number}-0a1b2c3d", {})
        (folder / "progress.json").write_text(text)
        (folder / "summary.json").write_bytes(text[: cut // 2].encode() + raw)
    write(runs, "not-a-run", ["list"])
    states = history(runs)
    assert len(states) == 4
    for state in states:
        json.dumps(_document(state))
        assert len(_row(state)) == 9
    MetricsFile(runs).write()


def test_a_record_that_cannot_be_written_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "reports").write_text("a file in the way")
    with record_at(tmp_path) as record, record.stage("train"):
        record.on_event({"event": "step"})  # not even a number
        record.on_event({"event": "step", "step": 1})
    assert caplog.text.count("reports") >= 1


def test_the_last_record_is_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_record, "BEAT_S", 0.001)
    real = run_record.replace_file

    def slow(path: Path, text: str, mode: int = 0o600) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.2)
        real(path, text, mode)

    monkeypatch.setattr(run_record, "replace_file", slow)
    with record_at(tmp_path) as record, record.stage("train"):
        time.sleep(0.1)  # the thread has begun to write that the stage runs
    (state,) = history(tmp_path)
    assert state.stages[0].result == "done"
