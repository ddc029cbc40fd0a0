"""`metrics.prom`: every number, whole files only, and no run that it stops."""

from __future__ import annotations

import json
import stat
import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from flows.monitoring.prometheus import COUNTERS, GAUGES, MetricsFile
from flows.monitoring.run_record import RunRecord
from tests.monitoring.records import RL_STEP, STEP, document, ended, record_at, write

Samples = dict[tuple[str, ...], float]


def samples(path: Path) -> Samples:
    """Return the samples of a file: (name, values of its labels by their names) -> value."""
    read: Samples = {}
    for family in text_string_to_metric_families(path.read_text()):
        for sample in family.samples:
            labels = [value for name, value in sorted(sample.labels.items()) if name != "runs"]
            assert sample.labels["runs"]
            read[(sample.name, *labels)] = sample.value
    return read


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with runs that ended in every way, and one that trains by reward."""
    ended(tmp_path, "20261123-100000-aaaaaaaa", "completed")
    ended(tmp_path, "20261123-110000-bbbbbbbb", "failed", error="no")
    write(tmp_path, "20261123-113000-cccccccc", document())
    kind = tmp_path / "artifacts" / "base" / "k"
    kind.mkdir(parents=True)
    (kind / "model").write_bytes(b"x" * 100_000)
    (tmp_path / "artifacts" / "served").mkdir()
    (tmp_path / "artifacts" / "served" / "model").hardlink_to(kind / "model")
    return tmp_path


def test_every_number(runs: Path) -> None:
    record = record_at(runs, "20991123-140000-dddddddd")
    with record, record.stage("ppo.train"):
        record.on_event({"event": "plan", "steps": 9})
        record.on_event({**STEP, **RL_STEP, "step": 2})
        record.on_event({**STEP, **RL_STEP})
        record._write()
        MetricsFile(runs).write()
        read = samples(runs / "metrics.prom")
    assert read["plumbline_runs_total", "rlhf", "completed"] == 1
    assert read["plumbline_runs_total", "rlhf", "failed"] == 1
    assert read["plumbline_runs_total", "rlhf", "lost"] == 1
    assert read["plumbline_running_runs", "rlhf"] == 1
    assert read["plumbline_last_exit_status", "rlhf"] == 1
    assert read["plumbline_stages_total", "rlhf", "reused", "prepare_data"] == 2
    assert read["plumbline_stages_total", "rlhf", "failed", "train"] == 1
    assert read["plumbline_stages_total", "rlhf", "lost", "train"] == 1
    assert ("plumbline_stage_last_seconds", "rlhf", "prepare_data") not in read
    assert read["plumbline_step", "rlhf", "ppo.train"] == 3
    assert read["plumbline_steps", "rlhf", "ppo.train"] == 9
    assert read["plumbline_reward", "rlhf", "ppo.train"] == 0.25
    assert read["plumbline_kl", "rlhf", "ppo.train"] == 0.01
    assert read["plumbline_tokens_per_second", "rlhf", "ppo.train"] == 1234
    assert read["plumbline_disk_bytes", "artifacts/base"] >= 100_000
    assert read["plumbline_disk_bytes", "artifacts/served"] == 0  # the same file again
    names = {f"plumbline_{name}" for name in GAUGES} | {f"plumbline_{n}_total" for n in COUNTERS}
    assert {key[0] for key in read} == names


def test_a_reader_never_sees_half_a_file(runs: Path) -> None:
    metrics, stop = MetricsFile(runs), threading.Event()
    metrics.write()
    whole = set(samples(runs / "metrics.prom"))

    def write_on() -> None:
        while not stop.is_set():
            metrics.write(False)

    thread = threading.Thread(target=write_on)
    thread.start()
    try:
        for _ in range(50):
            assert set(samples(runs / "metrics.prom")) == whole
    finally:
        stop.set()
        thread.join()
    assert list(runs.glob(".metrics*")) == []
    assert stat.S_IMODE((runs / "metrics.prom").stat().st_mode) == 0o644


def test_a_place_that_cannot_be_written_stops_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = MetricsFile(tmp_path, f"{tmp_path}/no_such_folder/x.prom")
    folder = tmp_path / "reports" / "20261123-140000-0a1b2c3d"
    record = RunRecord(
        folder, {"flow": "rlhf"}, lambda name, work, inputs: work(None), metrics.write
    )
    with record, record.stage("train"):
        pass
    assert caplog.text.count("no_such_folder") == 1
    assert json.loads((folder / "progress.json").read_text())["stages"][0]["seconds"] >= 0
