"""Retention: what a folder of runs still needs is never removed, whatever kills the removal."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import ArtifactError
from tasks.pipeline.artifact import (
    Artifact,
    Origin,
    intact,
    open_artifact,
    publish,
    remember,
    staging,
    verify,
)
from tasks.pipeline.retention import (
    DAY_S,
    REGISTERED,
    RESUMABLE,
    Plan,
    plan,
    remove,
)
from tests.killing import kills

NOW = 1_700_000_000.0


class Store:
    """A folder of runs with small real artifacts."""

    def __init__(self, runs: Path) -> None:
        self.runs, self.made = runs, 0

    def make(self, kind: str, age_d: float = 100.0, **inputs: Artifact) -> Artifact:
        self.made += 1
        key = f"{self.made:020x}"
        final = self.runs / "artifacts" / kind / key
        digests = {role: artifact.digest for role, artifact in inputs.items()}
        with staging(final) as work:
            (work / "text.txt").write_text(f"{kind} {self.made}" * 100)
            artifact = publish(work, final, Origin(kind, kind, key, digests))
        remember(artifact, self.seen)
        self.age(artifact.path / "manifest.json", age_d)
        self.age(self.seen / f"{artifact.digest}.json", age_d)
        return artifact

    @property
    def seen(self) -> Path:
        return self.runs / "artifacts" / ".seen"

    def age(self, path: Path, age_d: float) -> None:
        os.utime(path, (NOW - age_d * DAY_S,) * 2)

    def chain(self, age_d: float = 100.0) -> dict[str, Artifact]:
        """Return base, data, shards, served and report of one run."""
        base, data = self.make("weights", age_d), self.make("dataset", age_d)
        shards = self.make("shards", age_d, base=base, data=data)
        served = self.make("served", age_d, weights=base, trained=shards)
        report = self.make("report", age_d, served=served, data=data)
        return {"base": base, "data": data, "shards": shards, "served": served, "report": report}

    def report(self, name: str, uri: str | None = None, **summary: Any) -> None:
        folder = self.runs / "reports" / name
        folder.mkdir(parents=True)
        summary = {"status": "completed", **summary}
        (folder / "summary.json").write_text(json.dumps(summary, indent=1))
        (folder / "config.yaml").write_text(f"tracking:\n  uri: {uri or 'null'}\n")

    def checkpoints(self, key: str, *, age_d: float = 100.0, step: bool = True, **job: str) -> Path:
        folder = self.runs / "checkpoints" / key
        (folder / ("step-00000005" if step else "engine")).mkdir(parents=True)
        (folder / "job.json").write_text(json.dumps(job))
        for path in (*folder.iterdir(), folder):
            self.age(path, age_d)
        return folder

    def plan(self, *registered: Artifact, uri: str | None = None, **limits: Any) -> Plan:
        versions = [(str(artifact.path), artifact.digest) for artifact in registered]
        uri = uri or f"sqlite:///{self.runs}/mlflow/mlflow.db"
        return plan(self.runs, versions, uri, now=NOW, **(limits or {"keep": 0}))

    def present(self) -> set[Path]:
        return set((self.runs / "artifacts").glob("[!.]*/[!.]*"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs")


def gone(planned: Plan) -> set[Path]:
    return {item.path for item in planned.items}


def paths(*artifacts: Artifact) -> set[Path]:
    return {artifact.path for artifact in artifacts}


def test_a_registered_model_keeps_what_it_was_made_from_and_its_report(store: Store) -> None:
    ours, other = store.chain(), store.chain()
    planned = store.plan(ours["served"])
    assert set(planned.kept) == paths(*ours.values())
    assert gone(planned) == paths(*other.values())
    assert set(planned.kept.values()) == {REGISTERED}


def test_a_damaged_manifest_of_a_registered_model_refuses(store: Store) -> None:
    ours, other = store.chain(), store.chain()
    (ours["served"].path / "manifest.json").write_text("{")
    with pytest.raises(ArtifactError, match="a registered model"):
        store.plan(ours["served"])
    planned = store.plan(other["served"])
    assert ours["served"].path in planned.kept  # what it was made from is not known


def test_what_was_used_lately_stays(store: Store) -> None:
    old, new = store.chain(), store.chain(age_d=3)
    assert gone(store.plan(new["base"], days=10)) == paths(*old.values())
    assert intact(old["shards"], store.seen) == []  # a run reuses it now
    os.utime(store.seen / f"{old['served'].digest}.json")
    assert set(store.plan(days=10).kept) == paths(*old.values(), *new.values())


def test_an_unfinished_training_keeps_checkpoints_and_inputs(store: Store) -> None:
    ours, other = store.chain(), store.chain()
    job = {"base": str(ours["base"].path), "data": f"/moved/runs/{ours['data'].path}"}
    folder = store.checkpoints("f" * 20, **job)
    finished = store.checkpoints(other["shards"].path.name)
    without = store.checkpoints("e" * 20, step=False, base=str(other["base"].path))
    planned = store.plan()
    assert planned.checkpoints == (folder,)
    assert {path for path, why in planned.kept.items() if why == RESUMABLE} == paths(
        ours["base"], ours["data"]
    )
    assert gone(planned) >= {finished, without, other["base"].path}
    assert folder in gone(store.plan(keep=0, unfinished=True))


def test_what_a_killed_run_has_used_stays_for_three_days(store: Store) -> None:
    started = time.strftime("%Y%m%d-%H%M%S", time.localtime(NOW - DAY_S))
    (store.runs / "logs" / f"{started}-dead").mkdir(parents=True)
    used, unused = store.make("weights", age_d=0.5), store.make("weights", age_d=5)
    assert gone(store.plan()) >= paths(unused)
    assert used.path in store.plan().kept
    store.report(f"{started}-dead")  # it has completed
    assert gone(store.plan()) >= paths(used, unused)


def test_a_model_registered_with_another_server_stays(store: Store) -> None:
    ours, other = store.chain(), store.chain()
    stages = [{"artifact": str(ours["served"].path)}]
    version = {"version": "models:/plumbline/1"}
    store.report("20200101-000000-aa", "http://mlflow:5000", stages=stages, gate=version)
    assert set(store.plan().kept) == paths(*ours.values())
    assert gone(store.plan(uri="http://mlflow:5000")) >= paths(*ours.values(), *other.values())
    (store.runs / "reports/20200101-000000-aa/config.yaml").write_text("{")
    assert set(store.plan(uri="http://mlflow:5000").kept) == paths(*ours.values())


def test_staging_folders_of_killed_stages(store: Store) -> None:
    parent = store.runs / "artifacts" / "weights"
    dead, alive = parent / ".dead.tmp", parent / ".alive.tmp"
    for folder in (dead, alive):
        folder.mkdir(parents=True)
    handle = os.open(alive, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        assert gone(store.plan(days=10)) == {dead}
    finally:
        os.close(handle)


def test_killed_at_any_point_the_next_prune_finishes(store: Store) -> None:
    ours = store.chain()

    def fill() -> dict[str, Artifact]:
        store.checkpoints(f"{store.made:020x}", step=False)
        return store.chain()

    def prune() -> None:
        remove(store.plan(ours["served"]))

    other = fill()
    rounds = 0
    for _ in kills(prune):
        assert paths(*ours.values()) <= store.present()
        for path in store.present():  # whatever a run can see is whole
            assert verify(open_artifact(path)) == []
        prune()
        assert store.present() == paths(*ours.values())
        assert not any((store.runs / "checkpoints").iterdir())
        fill()
        rounds += 1
    assert rounds > 2 * len(other)
