"""Nodes of a run meet in a shared folder; these tests start no ranks."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tasks.core.errors import ConfigError, StageProcessError, TrainingError
from tasks.process.child import child_environment
from tasks.process.multinode import RANK_VARIABLES, Leader, Meeting, follow, rendezvous
from tests.process.conftest import until

FOLLOWER = Meeting("10.0.0.1", 29500, 1, 2)
LEADER = Meeting("10.0.0.1", 29500, 0, 2)


def environment(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    names = ("MASTER_ADDR", "MASTER_PORT", "PET_MASTER_ADDR", "PET_MASTER_PORT", *RANK_VARIABLES)
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "name", ["NODE_RANK", "PET_NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX"]
)
def test_a_node_knows_its_place(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    environment(monkeypatch, MASTER_ADDR="10.0.0.1", MASTER_PORT="29500", **{name: "1"})
    assert Meeting.from_environment(2) == FOLLOWER
    with rendezvous(FOLLOWER) as (meet, variables):
        assert meet == [
            "--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1",
            "--master-port", "29500",
        ]  # fmt: skip
        assert variables == {}


def test_a_node_that_kubeflow_has_started_knows_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer 2 sets torchrun's variables only; its torchrun gets them as arguments, once."""
    values = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "1", "NNODES": "2"}
    environment(monkeypatch, **{f"PET_{name}": value for name, value in values.items()})
    assert Meeting.from_environment(2) == FOLLOWER
    assert not [name for name in child_environment({}) if name.startswith("PET_")]


def test_all_missing_variables_are_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch)
    with pytest.raises(ConfigError) as caught:
        Meeting.from_environment(2)
    assert len(caught.value.details) == 3
    assert "NODE_RANK" in caught.value.hint


def test_wrong_variables_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for values, named in (
        ({"NODE_RANK": "2"}, "NODE_RANK=2"),
        ({"NODE_RANK": "first"}, "NODE_RANK=first"),
        ({"NODE_RANK": "0", "MASTER_PORT": "x"}, "MASTER_PORT=x"),
    ):
        environment(monkeypatch, **{"MASTER_ADDR": "a", "MASTER_PORT": "1", **values})
        with pytest.raises(ConfigError) as caught:
            Meeting.from_environment(2)
        assert any(line.startswith(named) for line in caught.value.details)


def following(runs: Path, joined: list[Path], **more: float) -> tuple[threading.Thread, list[int]]:
    statuses: list[int] = []

    def run() -> None:
        statuses.append(follow(FOLLOWER, runs, joined.append, poll_s=0.02, **more))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, statuses


def test_a_follower_joins_each_call_once_and_ends_with_the_leader(tmp_path: Path) -> None:
    joined: list[Path] = []
    thread, statuses = following(tmp_path, joined)
    with Leader(LEADER, tmp_path) as leader:
        for job in ("one", "two"):
            with leader.call(Path(job)):
                until(lambda job=job: joined and joined[-1] == Path(job), 20)
                time.sleep(0.2)
    thread.join(20)
    assert joined == [Path("one"), Path("two")]
    assert statuses == [0]


def test_followers_get_the_status_of_a_failed_leader(tmp_path: Path) -> None:
    thread, statuses = following(tmp_path, [])
    leader = Leader(LEADER, tmp_path).__enter__()
    time.sleep(0.2)
    leader.__exit__(ValueError, ValueError("boom"), None)
    thread.join(20)
    assert statuses == [1]


def test_files_of_a_killed_leader_are_ignored(tmp_path: Path) -> None:
    folder = LEADER.folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / "beacon.json").write_text('{"over": true, "status": 0}')
    (folder / "call-0001.json").write_text('{"job": "old"}')
    joined: list[Path] = []
    with pytest.raises(TrainingError, match="node 0"):
        follow(FOLLOWER, tmp_path, joined.append, silent_s=0.5, poll_s=0.02)
    assert not joined


def test_a_leader_without_heartbeat_counts_as_dead(tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            follow(FOLLOWER, tmp_path, lambda _: None, silent_s=1.0, poll_s=0.02)
        except TrainingError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    folder = LEADER.folder(tmp_path)
    folder.mkdir(parents=True)
    for beat in range(3):
        (folder / "beacon.json").write_text(f'{{"beat": {beat}}}')
        time.sleep(0.2)
    thread.join(20)
    assert "node 0" in str(failed[0])


def test_failed_ranks_of_a_follower_are_left_to_the_leader(tmp_path: Path) -> None:
    calls: list[Path] = []

    def join(job: Path) -> None:
        calls.append(job)
        raise StageProcessError("train", 1, ["lost"], "exit")

    statuses: list[int] = []
    thread = threading.Thread(
        target=lambda: statuses.append(follow(FOLLOWER, tmp_path, join, poll_s=0.02))
    )
    thread.start()
    with Leader(LEADER, tmp_path) as leader, leader.call(Path("job")):
        until(lambda: calls, 20)
        time.sleep(0.2)
    thread.join(20)
    assert (calls, statuses) == ([Path("job")], [0])
