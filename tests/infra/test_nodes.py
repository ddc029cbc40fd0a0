"""The scripts that start a run on several nodes."""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import PROJECT

NODES = PROJECT / "infra" / "nodes"
SMALL = [
    "+exp=lora_zero3", "train.nodes=2", "train.nproc=1", "train.threads=1", "train.max_steps=4",
    "model.steps=20", "smoke.engine=transformers", "smoke.eval_samples=4",
    "smoke.min_stop_rate=0", "smoke.max_degenerate_rate=1",
]  # fmt: skip


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces that see each other as 10.77.0.1 and 10.77.0.2, and nothing else."""
    tag = uuid.uuid4().hex[:6]
    names = [f"pl{tag}a", f"pl{tag}b"]
    try:
        for name in names:
            ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        ip("link", "add", "node0", "netns", names[0], "type", "veth",
           "peer", "name", "node1", "netns", names[1])  # fmt: skip
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", f"node{number}")
            for device in ("lo", f"node{number}"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_zero3_over_two_nodes(namespaces: list[str], tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    started = []
    for number, name in enumerate(namespaces):
        inside = ["ip", "netns", "exec", name, NODES / "bare.sh", str(number), "10.77.0.1"]
        started.append(
            subprocess.Popen(
                [*inside, *SMALL, f"paths.runs={runs}"],
                env={**os.environ, "INTERFACE": f"node{number}"},
                stdout=(tmp_path / f"node{number}.log").open("w"), stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    ended = [process.wait(timeout=500) for process in started]
    logs = [(tmp_path / f"node{number}.log").read_text() for number in range(2)]
    assert ended == [0, 0], "\n".join(logs)
    shards = sorted((runs / "artifacts" / "shards").glob("*/shards/*.safetensors"))
    assert [path.name for path in shards] == [f"rank-0000{r}-of-00002.safetensors" for r in (0, 1)]
    summary = json.loads((runs / "latest" / "summary.json").read_text())
    assert summary["status"] == "completed"
    drift = {stage["name"]: stage["drift"] for stage in summary["stages"]}
    assert drift["gather"]["mean_kl"] == 0.0
    assert "node 1 of 2 follows 10.77.0.1" in logs[1]
