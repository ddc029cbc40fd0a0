"""Nodes of a run meet in a shared folder; these tests start no ranks."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tasks.core.errors import StageProcessError, TrainingError
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


def test_a_node_knows_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NODE_RANK", "PET_NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX"):
        environment(monkeypatch, MASTER_ADDR="10.0.0.1", MASTER_PORT="29500", **{name: "1"})
        assert Meeting.from_environment(2) == FOLLOWER, name
    with rendezvous(FOLLOWER) as (meet, variables):
        assert meet == [
            "--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1",
            "--master-port", "29500",
        ]  # fmt: skip
        assert variables == {}
    # Kubeflow's Trainer 2 sets torchrun's variables; its torchrun gets them as arguments, once.
    values = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "1", "NNODES": "2"}
    environment(monkeypatch, **{f"PET_{name}": value for name, value in values.items()})
    assert Meeting.from_environment(2) == FOLLOWER
    assert not [name for name in child_environment({}) if name.startswith("PET_")]


class Follower:
    """Node 1, in a thread; `ended` has its status or its error, `joined` the jobs that it got."""

    def __init__(self, runs: Path, *, fails: bool = False, **more: float) -> None:
        self.joined: list[Path] = []
        self.ended: list[int | TrainingError] = []

        def join(job: Path) -> None:
            self.joined.append(job)
            if fails:
                raise StageProcessError("train", 1, ["lost"], "exit")

        def run() -> None:
            try:
                self.ended.append(follow(FOLLOWER, runs, join, poll_s=0.02, **more))
            except TrainingError as error:
                self.ended.append(error)

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def end(self) -> int | TrainingError:
        self.thread.join(20)
        (ended,) = self.ended
        return ended


@pytest.mark.parametrize("fails", [False, True])
def test_a_follower_joins_each_call_once_and_ends_with_the_leader(
    tmp_path: Path, fails: bool
) -> None:
    """Failed ranks of a follower are left to the leader."""
    follower = Follower(tmp_path, fails=fails)
    with Leader(LEADER, tmp_path) as leader:
        for job in ("one", "two"):
            with leader.call(Path(job)):
                until(lambda job=job: follower.joined[-1:] == [Path(job)], 20)
                time.sleep(0.2)
    assert follower.end() == 0
    assert follower.joined == [Path("one"), Path("two")]


def test_a_leader_that_was_killed_before_or_is_silent_counts_as_dead(tmp_path: Path) -> None:
    beacon = LEADER.beacon(tmp_path)
    beacon.parent.mkdir(parents=True)
    beacon.write_text('{"status": 0, "call": "a", "job": "old"}')
    follower = Follower(tmp_path, silent_s=0.5)
    assert "node 0" in str(follower.end())
    assert follower.joined == []
    follower = Follower(tmp_path, silent_s=1.0)
    for beat in range(3):
        beacon.write_text(f'{{"beat": {beat}}}')
        time.sleep(0.2)
    assert "node 0" in str(follower.end())
