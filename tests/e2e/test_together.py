"""Several runs at once in one folder: they share what is finished, and wait for what is not."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tasks.pipeline.artifact import open_artifact, verify
from tests.commands import command, environment, mlflow_client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def summaries(runs: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in (runs / "reports").glob("*/summary.json")]


def test_each_artifact_is_made_once_and_every_run_is_complete(tmp_path: Path) -> None:
    """Two equal commands and a different one, from an empty folder."""
    runs = tmp_path / "runs"
    variants = [[], [], ["train.lr=1e-4"]]
    started = []
    for number, overrides in enumerate(variants):
        argv = command(
            "rlhf", "+exp=sft_qlora", *overrides, f"paths.runs={runs}", "smoke.engine=transformers"
        )
        with (tmp_path / f"{number}.out").open("wb") as out:
            started.append(
                subprocess.Popen(argv, cwd=tmp_path, env=environment(), stdout=out, stderr=out)
            )
    codes = [each.wait(1400) for each in started]
    texts = [(tmp_path / f"{number}.out").read_text() for number in range(3)]
    assert codes == [0, 0, 0], "\n".join(texts)
    for text, each in zip(texts, summaries(runs), strict=True):
        assert "served model: " in text  # each prints its own summary
        assert each["status"] == "completed"
    assert sum("waits: " in text for text in texts) >= 2

    entries = [entry for each in summaries(runs) for entry in each["stages"][:-1]]
    made = Counter(entry["artifact"] for entry in entries if not entry["reused"])
    assert set(made.values()) == {1}  # none twice
    assert set(made) == {entry["artifact"] for entry in entries}
    stages = Counter(entry["name"] for entry in entries if not entry["reused"])
    assert stages["prepare_base"] == stages["prepare_data"] == 1
    assert stages["train"] == stages["convert"] == 2
    assert all(verify(open_artifact(Path(path))) == [] for path in made)

    client = mlflow_client(f"sqlite:///{runs}/mlflow/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "plumbline"]
    states = Counter(run.info.status for run in client.search_runs([experiment.experiment_id]))
    assert set(states) == {"FINISHED"}
    assert states["FINISHED"] == 3 + sum(len(each["stages"]) - 1 for each in summaries(runs))
    assert (runs / ".lock").read_text() == ""
