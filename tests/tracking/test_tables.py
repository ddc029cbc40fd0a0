"""Tables of a stage, as MLflow's own client finds them."""

from __future__ import annotations

import json
from pathlib import Path

from mlflow import MlflowClient

from flows.orchestration.progress import Progress
from tasks.pipeline.artifact import Artifact, Origin, publish, staging
from tasks.tracking.tracker import Tracker


def test_an_online_stage_leaves_its_samples(tmp_path: Path) -> None:
    """Events as training emits them; the second row of the table has a column of its own."""
    with staging(tmp_path / "shards") as work:
        (work / "train.json").write_text("{}")
        origin = Origin(kind="shards", stage="train", key="k")
        artifact: Artifact = publish(work, tmp_path / "shards", origin)
    tracker = Tracker(
        f"sqlite:///{tmp_path}/mlflow.db", "plumbline", tmp_path / "logged", tmp_path / "outbox"
    )
    with tracker.flow("f", {}, "", {}), tracker.stage("train", origin) as run:
        told = Progress(run, _Silent())
        told({"event": "plan", "steps": 2})
        told({"event": "eval", "when": "before", "step": 0, "reward": 0.25, "length": 3.0})
        for step in (1, 2):
            told({"event": "step", "step": step, "reward": step / 2, "kl": 0.1 * step})
            row = {"id": "a", "reply": "x" * step, "reward": step / 2}
            rows = [row if step == 1 else {**row, "reward/model": 1.0}]
            told({"event": "samples", "step": step, "rows": rows})
        run.finish(artifact, {}, reused=False)
    client = MlflowClient(tracker.uri)
    files = {file.path for file in client.list_artifacts(run.run_id)}
    assert "samples.json" in files
    folder = Path(client.download_artifacts(run.run_id, "", str(tmp_path)))
    table = json.loads((folder / "samples.json").read_text())
    assert table["columns"] == ["step", "id", "reply", "reward", "reward/model"]
    assert table["data"] == [[1, "a", "x", 0.5, None], [2, "a", "xx", 1.0, 1.0]]
    metrics = client.get_run(run.run_id).data.metrics
    assert metrics["train/reward"] == 1.0
    assert metrics["eval/reward_before"] == 0.25
    tags = [t for t in client.get_run(run.run_id).data.tags if "loggedArtifacts" in t]
    assert tags, "MLflow's page shows it as a table"


class _Silent:
    """A log that nobody reads."""

    def info(self, *_: object) -> None: ...
