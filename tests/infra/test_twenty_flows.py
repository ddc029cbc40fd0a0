"""Twenty flows at once against the server of `make up`: none is lost, none runs twice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.infra.requirements_files import PROJECT
from tests.infra.site import Site

COUNT = 20
SCRIPT = Path(__file__).with_name("tiny_flow.py")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_none_is_lost(busy_site: Site, tmp_path: Path) -> None:
    """They share one folder, its artifacts and its MLflow, and queue for the only device."""
    runs, prefect = busy_site.services.runs, busy_site.services.prefect
    started = []
    for number in range(COUNT):
        with (tmp_path / f"{number}.out").open("wb") as out:
            argv = [sys.executable, str(SCRIPT), str(runs), str(number)]
            env = busy_site.env | {"PYTHONPATH": str(PROJECT)}
            started.append(subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=out, stderr=out))
    codes = [each.wait(1400) for each in started]
    texts = [(tmp_path / f"{number}.out").read_text() for number in range(COUNT)]
    failed = [text for code, text in zip(codes, texts, strict=True) if code]
    assert failed == []

    names = [f"tiny-{number}" for number in range(COUNT)]
    wanted = {"flow_runs": {"name": {"any_": names}}, "limit": 200}
    flow_runs = prefect.post("/flow_runs/filter", wanted)
    assert sorted(run["name"] for run in flow_runs) == sorted(names)
    assert Counter(run["state_type"] for run in flow_runs) == {"COMPLETED": COUNT}
    tasks = {"flow_runs": {"id": {"any_": [run["id"] for run in flow_runs]}}, "limit": 200}
    states = Counter(run["state_type"] for run in prefect.post("/task_runs/filter", tasks))
    assert states == {"COMPLETED": 3 * COUNT}

    summaries = [json.loads(path.read_text()) for path in runs.glob("reports/*/summary.json")]
    tiny = [summary for summary in summaries if summary["flow"] == "tiny"]
    assert len(tiny) == COUNT
    made = Counter(
        entry["name"] for each in tiny for entry in each["stages"] if not entry["reused"]
    )
    assert made == {"base": 1, "train": COUNT, "convert": COUNT}

    client = MlflowClient(f"sqlite:///{runs}/mlflow/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "plumbline"]
    tracked = client.search_runs([experiment.experiment_id], max_results=1000)
    parents = [run.info for run in tracked if run.info.run_name.startswith("tiny ")]
    assert sorted(info.run_name for info in parents) == sorted(f"tiny {n}" for n in range(COUNT))
    ids = {info.run_id for info in parents}
    children = [run.info for run in tracked if run.data.tags.get("mlflow.parentRunId") in ids]
    assert len(children) == 3 * COUNT
    assert {info.status for info in [*parents, *children]} == {"FINISHED"}
    assert list((runs / "mlflow" / "outbox").glob("*/journal.jsonl")) == []
