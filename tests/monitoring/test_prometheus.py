"""`metrics.prom`: numbers of all runs, and no run that it stops."""

from __future__ import annotations

import stat
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from flows.monitoring.prometheus import MetricsFile
from tests.monitoring.records import RL_STEP, STEP, document, ended, record_at, write


def samples(path: Path) -> dict[tuple[str, ...], float]:
    """Return the samples of a file: (name, values of its labels by their names) -> value."""
    return {
        (each.name, *(value for name, value in sorted(each.labels.items()) if name != "runs")):
        each.value
        for family in text_string_to_metric_families(path.read_text())
        for each in family.samples
    }  # fmt: skip


def test_numbers_of_runs_that_ended_in_every_way_and_of_one_that_trains(tmp_path: Path) -> None:
    ended(tmp_path, "20261123-100000-aaaaaaaa", "completed")
    ended(tmp_path, "20261123-110000-bbbbbbbb", "failed", error="no")
    write(tmp_path, "20261123-113000-cccccccc", document())
    record = record_at(tmp_path, "20991123-140000-dddddddd")
    with record, record.stage("ppo.train"):
        record.on_event({"event": "plan", "steps": 9})
        record.on_event({**STEP, **RL_STEP})
        record._write()
        MetricsFile(tmp_path).write()
    read = samples(tmp_path / "metrics.prom")
    for state in ("completed", "failed", "lost"):
        assert read["plumbline_runs_total", "rlhf", state] == 1
    assert read["plumbline_running_runs", "rlhf"] == 1
    assert read["plumbline_last_exit_status", "rlhf"] == 1
    assert read["plumbline_stages_total", "rlhf", "reused", "prepare_data"] == 2
    assert read["plumbline_stages_total", "rlhf", "failed", "train"] == 1
    assert read["plumbline_step", "rlhf", "ppo.train"] == 3
    assert read["plumbline_steps", "rlhf", "ppo.train"] == 9
    assert read["plumbline_reward", "rlhf", "ppo.train"] == 0.25
    assert read["plumbline_tokens_per_second", "rlhf", "ppo.train"] == 1234
    assert stat.S_IMODE((tmp_path / "metrics.prom").stat().st_mode) == 0o644
