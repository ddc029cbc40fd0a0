"""`plumbline promote` and `serve` with a real registry."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cli import tool
from tasks.pipeline.artifact import Artifact, Origin, publish, staging
from tasks.tracking.mlflow_server import RegisteredModel
from tasks.tracking.tracker import Tracker
from tests.commands import mlflow_client

Command = Callable[..., tuple[int, str]]


def make(runs: Path, kind: str, key: str, **inputs: Artifact) -> Artifact:
    final = runs / "artifacts" / kind / (key * 20)
    digests = {role: artifact.digest for role, artifact in inputs.items()}
    with staging(final) as work:
        for name in ("train.jsonl", "heldout.jsonl") if kind == "dataset" else ("config.json",):
            (work / name).write_text(json.dumps({"of": key, "file": name}))
        return publish(work, final, Origin(kind, f"make_{kind}", key * 20, digests))


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Path:
    """A folder of runs with two registered versions; the second one is the candidate."""
    runs = tmp_path_factory.mktemp("registry") / "runs"
    data, base = make(runs, "dataset", "d"), make(runs, "base", "b")
    store = runs / "mlflow"
    store.mkdir()
    shutil.copy(empty_database, store)
    tracker = Tracker(f"sqlite:///{store}/mlflow.db", "e", store / "artifacts", store / "reports")
    with tracker.flow("test", {}, "", {}):
        for day, key in enumerate("12", 1):
            shards = make(runs, "shards", f"a{key}", base=base, data=data)
            weights = make(runs, "weights", f"c{key}", trained=shards, base=base)
            served = make(runs, "served", f"e{key}", weights=weights, trained=shards)
            tags = {"gate": "passed" if key == "1" else "eval.loss <= 1: 2, and the limit is 1"}
            tracker.register(RegisteredModel("toy", served, f"2026-03-0{day}T10:00:00+00:00", tags))
    return runs


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run `plumbline ...` in this process; return exit status and output."""

    def run(command: str, *words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [f"plumbline {command}", *words])
        status = tool.run(command, words)
        return status, "".join(capsys.readouterr())

    return run


def champion(runs: Path) -> str:
    client = mlflow_client(f"sqlite:///{runs}/mlflow/mlflow.db")
    return str(client.get_model_version_by_alias("toy", "champion").version)


def test_promote_and_roll_back(registry: Path, typed: Command) -> None:
    place = f"paths.runs={registry}"
    status, text = typed("promote", "models:/toy/1", place)
    assert (status, champion(registry)) == (0, "1")
    assert "eval.loss" not in text
    status, text = typed("promote", "models:/toy@candidate", place)
    assert status == 0, text
    assert all(thing in text for thing in ("models:/toy/2", "models:/toy/1", "eval.loss <= 1"))
    assert champion(registry) == "2"

    served = registry / "artifacts" / "served" / ("e1" * 20)
    good = (served / "config.json").read_bytes()
    (served / "config.json").write_bytes(good.replace(b"e1", b"e9"))
    status, text = typed("promote", "models:/toy/1", place)
    assert status == 1
    assert "config.json" in text
    assert champion(registry) == "2"
    (served / "config.json").write_bytes(good)
    assert typed("promote", "models:/toy/1", place)[0] == 0
    assert champion(registry) == "1"


def test_serve_leaves_memory_to_others_and_shows_the_command_that_it_becomes(
    registry: Path, typed: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU vLLM would ask for 92 % of the machine; a folder that was altered is not served."""
    became: list[list[str]] = []
    monkeypatch.setattr("os.execvp", lambda program, words: became.append(words))
    monkeypatch.setattr("tasks.core.machine.has_gpu", lambda device="auto": False)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "")  # so that it is restored
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    status, text = typed("serve", "models:/toy/2", f"paths.runs={registry}", "--port", "1")
    assert not status, text
    (words,) = became
    assert words[-2:] == ["--port", "1"]
    assert shlex.join(words) in text
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] in ("1", "2", "3", "4")
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
    (registry / "artifacts" / "served" / ("e2" * 20) / "more.txt").write_text("x")
    status, text = typed("serve", "models:/toy/2", f"paths.runs={registry}", "--port", "1")
    (registry / "artifacts" / "served" / ("e2" * 20) / "more.txt").unlink()
    assert (status, len(became)) == (1, 1)
    assert "more.txt" in text
