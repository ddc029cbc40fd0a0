"""Program for torchrun: a policy is synced to vLLM servers, sampled, changed and synced again.

torchrun ... -m tests.rl.rollout.server_program JOB.json ...

Each job writes `rank-<n>.json` with its observations.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tasks.rl.experience.responses import Request
from tasks.serving.rollout_servers.remote import RemoteServer
from tests.rl.rollout.rollout_program import Bench, _ids, _said, main, requests

MANY = 24
"""Responses to each of five requests while a server is killed."""
ENGINE_SEQS = 32
"""`rollout.max_num_seqs` of the jobs."""


def watch(bench: Bench) -> dict[str, Any]:
    """Sync, sample, change the policy, plant faults, kill servers; return what happens."""
    mine, seen = requests(bench.ranks.rank), {}
    bench.perturb(0.02)
    began = time.monotonic()
    with bench.answering() as answering:
        engine: Any = answering
        seen["start_s"] = time.monotonic() - began
        seen["unpublished"] = _said(lambda: answering.generate(mine))
        result = answering.sync_weights()
        seen["versions"], seen["sync_s"] = [result.version], [result.seconds]
        first = answering.generate(mine)
        seen["replies"] = _ids(first)
        seen["again"] = _ids(answering.generate(mine)) == _ids(first)
        seen["none"] = answering.generate([]) if bench.ranks.first else _ids(
            answering.generate(mine)
        ) == _ids(first)  # fmt: skip
        seen["ended"] = [g.ended == bool(g.ids[-1] == 256) for some in first for g in some]
        seen["differs"] = bench.differs(first)
        seen["mismatch"] = engine.mismatch
        seen["of version"] = sorted({g.version for some in first for g in some})
        bench.perturb(0.02)
        seen["stale"] = _said(lambda: answering.generate(mine))
        seen["stale_differs"] = bench.differs(first)
        seen["versions"].append(answering.sync_weights().version)
        second = answering.generate(mine)
        seen["differs_after"] = bench.differs(second)
        seen["behind"] = bench.behind(answering.generate(mine, greedy=True))
        answering.start_ahead(mine)  # type: ignore[attr-defined]
        bench.perturb(0.02)
        seen["versions"].append(answering.sync_weights().version)
        ahead = answering.generate(mine)
        seen["ahead"] = _ids(ahead) == _ids(second)
        seen["ahead of version"] = sorted({g.version for some in ahead for g in some})
        seen["faults"] = _faults(bench, answering)
        seen["killed"] = _killed(bench, engine)
        folder = engine._folder
        bench.ranks.barrier()  # the first rank is the one that removes the folder
        seen["published"] = sorted(path.name.rpartition("-")[2] for path in folder.iterdir())
        bench.ranks.barrier()
        supervisors = [server.pid for server in engine._fleet.started]
    seen["left"] = folder.exists() or [p for p in supervisors if Path(f"/proc/{p}").exists()]
    return seen


def _faults(bench: Bench, answering: Any) -> dict[str, str]:
    """Plant faults of servers, each for one sync; return the errors."""
    seen = {}
    plants = {"old adapter": _old_adapter, "base": _base_alone}
    if not answering._policy.as_adapter:
        plants = {"reload does nothing": _no_reload}
    for name, plant in plants.items():
        for scale in (0.02, 0.002):
            bench.perturb(scale)
            with plant(answering):
                seen[f"{name} {scale}"] = _said(answering.sync_weights)
            seen[f"{name} {scale}, then right"] = _said(answering.sync_weights)
    return seen


@contextmanager
def _old_adapter(answering: Any) -> Iterator[None]:
    """One server loads the last version's adapter under the new name."""
    right = RemoteServer.load_adapter
    old = answering._folder / answering._named(answering.version)
    servers = answering._fleet.servers

    def load(self: RemoteServer, name: str, folder: Path, timeout_s: float) -> None:
        right(self, name, old if self is servers[-1] else folder, timeout_s)

    with patch.object(RemoteServer, "load_adapter", load):
        yield


@contextmanager
def _base_alone(answering: Any) -> Iterator[None]:
    """One server samples from the base."""
    right = RemoteServer.load_adapter
    servers = answering._fleet.servers

    def load(self: RemoteServer, name: str, folder: Path, timeout_s: float) -> None:
        right(self, name, folder, timeout_s)
        if self is servers[-1]:
            self.model = self.base

    with patch.object(RemoteServer, "load_adapter", load):
        yield


@contextmanager
def _no_reload(answering: Any) -> Iterator[None]:
    """One server keeps its weights."""
    right = RemoteServer.load_weights
    servers = answering._fleet.servers

    def load(self: RemoteServer, folder: Path, timeout_s: float) -> None:
        if self is not servers[-1]:
            right(self, folder, timeout_s)

    with patch.object(RemoteServer, "load_weights", load):
        yield


def _killed(bench: Bench, engine: Any) -> dict[str, Any]:
    """Kill one server while it generates, then both, then both again."""
    seen: dict[str, Any] = {}
    many = [Request(r.ids, MANY, r.seed) for r in requests(bench.ranks.rank)]
    good = _ids(engine.generate(many))
    began = time.monotonic()
    with _killing(bench, engine, 1):
        seen["one"] = _ids(engine.generate(many)) == good
    seen["one_s"] = time.monotonic() - began
    seen["lost"] = len([s for s in engine._fleet.servers if s.lost])
    bench.perturb(0.02)
    engine.sync_weights()
    seen["back"] = len(engine._fleet.present)
    good = _ids(engine.generate(many))
    with _killing(bench, engine, 2):
        seen["both"] = _ids(engine.generate(many)) == good
    seen["left"] = len(engine._fleet.present)
    with _killing(bench, engine, 2):
        seen["all"] = _said(lambda: engine.generate(many))
    return seen


@contextmanager
def _killing(bench: Bench, engine: Any, count: int) -> Iterator[None]:
    """Send SIGKILL to each of `count` servers with its 33rd request: 32 are under way at once."""
    if not bench.ranks.first:
        yield
        return
    right = RemoteServer.body
    alive = [server for server in engine._fleet.started if not server.remote.lost]
    doomed = {server.remote.url: server.pid for server in alive[:count]}
    asked: Counter[str] = Counter()

    def body(self: RemoteServer, *args: Any, **kwargs: Any) -> Any:
        asked[self.url] += 1
        if asked[self.url] == ENGINE_SEQS + 1 and self.url in doomed:
            for pid in _descendants(doomed[self.url]):
                os.kill(pid, signal.SIGKILL)
        return right(self, *args, **kwargs)

    with patch.object(RemoteServer, "body", body):
        yield
    assert all(asked[url] > ENGINE_SEQS for url in doomed), "nothing was killed"


def _descendants(pid: int) -> list[int]:
    """Return the processes below a supervisor, which are the server."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [p for child in map(int, children) for p in (child, *_descendants(child))]


if __name__ == "__main__":
    main({"grpo": watch})
