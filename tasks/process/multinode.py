"""Several machines, one run: who leads, who follows, and how they find each other.

Every machine is given the same command. `NODE_RANK` (or what SLURM and Kubernetes set) tells them
apart: node 0 leads and runs the flow, the others follow and only lend their ranks to training.
They meet in a folder that all of them see, `<paths.runs>/nodes/<address>_<port>`:

    beacon.json     the leader's: a number that grows while it lives, then how it ended
    call-0001.json  the job that ranks are wanted for; gone once it has ended

A file system is all this needs; the ranks themselves meet through torchrun at MASTER_ADDR and
MASTER_PORT.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.errors import ConfigError, StageProcessError, TrainingError

BEAT_S = 2.0
SILENT_S = 60.0
"""A leader whose beacon has not moved for so long is taken to be dead."""
RANK_VARIABLES = ("NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX")


@dataclass(frozen=True)
class Meeting:
    """Where the nodes of a run meet, and which of them this is."""

    address: str
    port: int
    rank: int
    nodes: int

    @classmethod
    def from_environment(cls, nodes: int) -> Meeting | None:
        """What the environment says; None for a run on one node.

        Raises:
            ConfigError: something is missing or makes no sense; all of it is named.
        """
        if nodes == 1:
            return None
        named = next((name for name in RANK_VARIABLES if name in os.environ), None)
        problems = [
            f"{name} is not set"
            for name in ("MASTER_ADDR", "MASTER_PORT")
            if name not in os.environ
        ]
        if named is None:
            problems.append(f"none of {', '.join(RANK_VARIABLES)} is set")
        elif not os.environ[named].isdigit() or int(os.environ[named]) >= nodes:
            problems.append(f"{named}={os.environ[named]} is not within 0 and {nodes - 1}")
        if not os.environ.get("MASTER_PORT", "0").isdigit():
            problems.append(f"MASTER_PORT={os.environ['MASTER_PORT']} is not a port")
        if problems or named is None:
            raise ConfigError(
                f"train.nodes={nodes}: this node does not know its place",
                details=problems,
                hint="on every node the same command, with MASTER_ADDR=<node 0> MASTER_PORT=29500 "
                "NODE_RANK=<0, 1, ...>; or train.nodes=1",
            )
        return cls(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ[named]), nodes
        )

    @property
    def leads(self) -> bool:
        """Whether this node runs the flow."""
        return self.rank == 0

    def folder(self, runs: Path) -> Path:
        """Where the nodes of this meeting find each other's files."""
        return runs / "nodes" / f"{self.address.replace(':', '-')}_{self.port}"

    @property
    def torchrun(self) -> list[str]:
        """What torchrun has to be told."""
        return [
            *("--nnodes", str(self.nodes)),
            *("--node-rank", str(self.rank)),
            *("--master-addr", self.address),
            *("--master-port", str(self.port)),
        ]


class Leader:
    """Node 0's side: a beacon that beats while the block runs, and calls for ranks.

    Args:
        meeting: of this run.
        runs: folder that all nodes see.
    """

    def __init__(self, meeting: Meeting, runs: Path) -> None:
        self.meeting = meeting
        self._folder = meeting.folder(runs)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="beacon", daemon=True)
        self._calls = 0

    def __enter__(self) -> Leader:
        """Begin to beat. What an earlier run left is taken away first."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in self._folder.glob("*.json"):
            old.unlink()
        self._write("beacon", {"beat": 0})
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Tell the others that it is over, and how."""
        self._stop.set()
        self._thread.join()
        self._write("beacon", {"over": True, "status": 0 if kind is None else 1})

    @contextlib.contextmanager
    def call(self, job: Path) -> Iterator[None]:
        """Ask every other node for its ranks while the block runs."""
        self._calls += 1
        name = f"call-{self._calls:04d}"
        self._write(name, {"job": str(job)})
        try:
            yield
        finally:
            (self._folder / f"{name}.json").unlink()

    def _beat(self) -> None:
        beat = 0
        while not self._stop.wait(BEAT_S):
            beat += 1
            self._write("beacon", {"beat": beat})

    def _write(self, name: str, document: dict[str, Any]) -> None:
        work = self._folder / f".{name}.{os.getpid()}"
        work.write_text(json.dumps(document) + "\n")
        work.rename(self._folder / f"{name}.json")


def follow(
    meeting: Meeting,
    runs: Path,
    join: Callable[[Path], None],
    *,
    silent_s: float = SILENT_S,
    poll_s: float = 0.5,
) -> int:
    """Lend this node's ranks to the leader until it is done.

    Args:
        meeting: of this run; not the leader's.
        runs: folder that all nodes see.
        join: runs this node's ranks of a job; a `StageProcessError` is the leader's to judge, whose
            own ranks fail too.
        silent_s: how long the leader may be silent.
        poll_s: how often to look.

    Returns:
        the leader's exit status.

    Raises:
        TrainingError: the leader has not come, or has gone without a word.
    """
    folder = meeting.folder(runs)
    done: set[str] = set()
    heard, last = time.monotonic(), _read(folder / "beacon.json")
    alive = False
    while True:
        beacon = _read(folder / "beacon.json")
        if beacon != last:
            heard, last, alive = time.monotonic(), beacon, True
        if alive and beacon and beacon.get("over"):
            return int(beacon["status"])
        if time.monotonic() - heard > silent_s:
            text = "has gone silent" if alive else "has not come"
            raise TrainingError(
                f"node {meeting.rank}: node 0 {text} within {silent_s:g} s ({folder})",
                hint="the same paths.runs has to be visible on every node; see node 0's log",
            )
        for path in sorted(folder.glob("call-*.json")) if alive else ():
            call = _read(path)
            if call is None or (key := f"{path.name} {call['job']}") in done:
                continue
            done.add(key)
            with contextlib.suppress(StageProcessError):
                join(Path(call["job"]))
            heard = time.monotonic()
        time.sleep(poll_s)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):  # not there yet, or just being replaced
        return None
    return found
