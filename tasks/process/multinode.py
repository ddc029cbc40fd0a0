"""One run on several machines: node 0 leads, the others follow.

The same command is started on every machine; `NODE_RANK` (or the variable of torchrun, SLURM or
Kubernetes) tells the nodes apart. Node 0 runs the flow, the others only lend their ranks to
training. Node 0 writes `<paths.runs>/nodes/<address>_<port>.json`, which all nodes read: a number
that grows while it is alive, the job that needs the ranks of all nodes, and its exit status.

The ranks themselves connect through torchrun at MASTER_ADDR and MASTER_PORT. Ranks of a single node
meet in a private folder instead, and no port is opened.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.errors import ConfigError, StageProcessError, TrainingError

BEAT_S = 2.0
SILENT_S = 60.0
"""Seconds without a change of the beacon after which the leader counts as dead."""
RANKS_FILE = "PLUMBLINE_RANKS_FILE"
"""Variable with the path of the file through which the ranks of a single node connect."""
RANK_VARIABLES = ("NODE_RANK", "PET_NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX")
"""Variables with the number of a node. `PET_` begins torchrun's own, which Kubeflow sets."""


@dataclass(frozen=True)
class Meeting:
    """Address of node 0 of a run, the number of this node (0 leads), and the number of nodes."""

    address: str
    port: int
    rank: int
    nodes: int

    @classmethod
    def from_environment(cls, nodes: int) -> Meeting | None:
        """Read the environment variables of a run on several nodes; None for a single node.

        Raises ConfigError, which names all variables that are missing or wrong.
        """
        if nodes == 1:
            return None
        address, port = (
            os.environ.get(name, os.environ.get(f"PET_{name}", ""))
            for name in ("MASTER_ADDR", "MASTER_PORT")
        )
        variable = next((name for name in RANK_VARIABLES if name in os.environ), "NODE_RANK")
        rank = os.environ.get(variable, "")
        problems = [] if address else ["MASTER_ADDR is not set"]
        if not port.isdigit():
            problems.append(f"MASTER_PORT={port} is not a port")
        if not rank.isdigit() or int(rank) >= nodes:
            problems.append(f"{variable}={rank} is not within 0 and {nodes - 1}")
        if problems:
            raise ConfigError(
                f"train.nodes={nodes}: this node does not know its place",
                details=problems,
                hint="on every node the same command, with MASTER_ADDR=<node 0> MASTER_PORT=29500 "
                "NODE_RANK=<0, 1, ...>; or train.nodes=1",
            )
        return cls(address, int(port), int(rank), nodes)

    @property
    def leads(self) -> bool:
        """True if this node runs the flow."""
        return self.rank == 0

    def beacon(self, runs: Path) -> Path:
        """Return the file of node 0, in a folder that all nodes share."""
        return runs / "nodes" / f"{self.address.replace(':', '-')}_{self.port}.json"


@contextlib.contextmanager
def rendezvous(meeting: Meeting | None) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield the arguments of torchrun and the variables with which the ranks of a run connect.

    On a single node they connect through files in a new folder that only this user can read, and
    send tensors over the loopback interface. Torchrun's own choice (`--standalone`) is a port on
    all interfaces, and it unpickles what any client writes there.
    """
    if meeting is not None:
        argv = ["--nnodes", str(meeting.nodes), "--node-rank", str(meeting.rank)]
        yield [*argv, "--master-addr", meeting.address, "--master-port", str(meeting.port)], {}
        return
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    env = {name: os.environ.get(name, "lo") for name in names}
    # Torchrun would open a port for a store that the ranks share with it.
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with tempfile.TemporaryDirectory(prefix="plumbline-ranks-") as folder:
        argv = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{folder}/torchrun"]
        argv += ["--rdzv-conf", "store_type=file", "--rdzv-id", "plumbline"]
        yield [*argv, "--local-addr", "127.0.0.1"], env | {RANKS_FILE: f"{folder}/ranks"}


class Leader:
    """Node 0 of a run: writes the beacon while the block runs, and asks for ranks."""

    def __init__(self, meeting: Meeting, runs: Path) -> None:
        self.meeting = meeting
        self._file = meeting.beacon(runs)
        self._state: dict[str, Any] = {"beat": 0}
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Leader:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._write()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Tell the other nodes that the run has ended, and its exit status."""
        self._stop.set()
        self._thread.join()
        self._write(status=0 if kind is None else 1)

    @contextlib.contextmanager
    def call(self, job: Path) -> Iterator[None]:
        """Ask all other nodes for their ranks for a job, whose file all nodes can read."""
        self._write(call=uuid.uuid4().hex, job=str(job))
        try:
            yield
        finally:
            self._write(call=None)

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            self._write()

    def _write(self, **changed: Any) -> None:
        with self._lock:
            self._state |= {"beat": self._state["beat"] + 1, **changed}
            work = self._file.with_suffix(f".{os.getpid()}.tmp")
            work.write_text(json.dumps(self._state) + "\n")
            work.rename(self._file)


def follow(
    meeting: Meeting,
    runs: Path,
    join: Callable[[Path], None],
    *,
    silent_s: float = SILENT_S,
    poll_s: float = 0.5,
) -> int:
    """Lend the ranks of this node to the leader until the run has ended. Returns its exit status.

    `join` runs the ranks of this node for a job. Its `StageProcessError` is ignored: the ranks of
    the leader fail, too, and it decides. Raises TrainingError if the beacon has not changed for
    `silent_s` seconds.
    """
    file, joined = meeting.beacon(runs), None
    heard, last, alive = time.monotonic(), _read(file), False  # may be that of an earlier run
    while True:
        beacon = _read(file)
        if beacon != last:
            heard, last, alive = time.monotonic(), beacon, True
        if time.monotonic() - heard > silent_s:
            text = "has gone silent" if alive else "has not come"
            raise TrainingError(
                f"node {meeting.rank}: node 0 {text} within {silent_s:g} s ({file})",
                hint="the same paths.runs has to be visible on every node; see node 0's log",
            )
        if alive and "status" in beacon:
            return int(beacon["status"])
        if alive and beacon.get("call") not in (None, joined):
            joined = beacon["call"]
            with contextlib.suppress(StageProcessError):
                join(Path(beacon["job"]))
            heard = time.monotonic()
        time.sleep(poll_s)


def _read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):  # not written yet, or just being replaced
        return {}
    return document
