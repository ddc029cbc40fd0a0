"""Program for torchrun: a policy is synced to vLLM servers, sampled, changed and synced again.

torchrun ... -m tests.rl.rollout.server_program JOB.json ...

Each job writes `rank-<n>.json` with its observations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tasks.serving.rollout_servers.remote import RemoteServer
from tests.rl.rollout.rollout_program import Bench, _ids, _said, main, requests


def watch(bench: Bench) -> dict[str, Any]:
    """Sync, sample, change the policy, plant faults, kill servers; return what happens."""
    mine, seen = requests(bench.ranks.rank), {}
    bench.perturb(0.02)
    with bench.answering() as answering:
        engine: Any = answering
        seen["unpublished"] = _said(lambda: answering.generate(mine))
        result = answering.sync_weights()
        seen["versions"] = [result.version]
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


if __name__ == "__main__":
    main({"grpo": watch})
