"""The journal of records for MLflow: what a crash, a second process and a full disk do to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.tracking.journal import MOST_VALUES, Journal, left_behind, new_journal, now
from tasks.tracking.outbox import Outbox


def metrics(step: int, count: int = 1) -> dict[str, object]:
    values = {f"m{number}": 1.0 for number in range(count)}
    return {"do": "metrics", "run": "a", "values": values, "step": step, "at": step}


def test_a_journal_has_one_owner(tmp_path: Path) -> None:
    journal = new_journal(tmp_path, "there")
    with pytest.raises(BlockingIOError):
        Journal(journal.folder)
    assert list(left_behind(tmp_path, "there")) == []


def test_half_a_record_is_dropped_and_open_runs_end_as_killed(tmp_path: Path) -> None:
    dead, last = new_journal(tmp_path, "there"), now() + 7
    for run in ("parent", "child", "done"):
        dead.append({"do": "start", "run": run, "at": 1})
    dead.append({"do": "end", "run": "done", "status": "FINISHED", "at": last})
    dead._file.write(b'{"do": "metr')
    dead._file.close()
    (found,) = left_behind(tmp_path, "there")
    records = [record for record, _ in found.records()]
    assert [(r["run"], r["status"], r["at"]) for r in records if r["do"] == "end"] == [
        ("done", "FINISHED", last),
        ("child", "KILLED", last),
        ("parent", "KILLED", last),
    ]
    found.delivered(found._path.stat().st_size)
    found.close()
    assert list(tmp_path.iterdir()) == []


def test_records_for_another_server_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    new_journal(tmp_path, "http://me:***@other")._file.close()
    assert list(left_behind(tmp_path, "there")) == []
    assert "a run with that tracking.uri delivers them" in caplog.text
    assert len(list(tmp_path.iterdir())) == 1


def test_metrics_of_several_steps_are_one_request(tmp_path: Path) -> None:
    journal = new_journal(tmp_path, "there")
    for step in range(3):
        journal.append(metrics(step))
    journal.append({"do": "tags", "run": "a", "tags": {}})
    for step in range(3):
        journal.append(metrics(step, count=MOST_VALUES // 2))
    assert [len(batch) for batch, _ in journal.batches()] == [1, 3, 1, 2, 1]
    *_, (_, end) = journal.batches()
    assert end == journal._path.stat().st_size


def test_a_full_disk_loses_records_and_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = Outbox(tmp_path, "there", lambda records, runs, folder: None)
    outbox._journal._file.close()
    outbox._journal._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    for step in range(3):
        outbox.put(**metrics(step))
    assert caplog.text.count("No space left on device") == 1
    assert "the disk is full" in outbox.report()
    outbox.close(10)
