"""A registered model, loaded with MLflow's own call by a user who knows only its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import ArtifactError
from tasks.pipeline.artifact import Artifact, Origin, publish, staging
from tasks.tracking.mlflow_server import RegisteredModel
from tasks.tracking.tracker import Tracker

REQUEST = {"messages": [{"role": "user", "content": "Reverse: ape"}], "max_tokens": 6}


@pytest.fixture
def registered(
    tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Path], Artifact]]:
    """Return a function that publishes a model folder as a served artifact, and registers it."""
    import mlflow

    uri = f"sqlite:///{shutil.copy(empty_database, tmp_path)}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)  # MLflow sets it, too, and leaves it
    mlflow.set_tracking_uri(uri)
    tracker = Tracker(uri, "plumbline", tmp_path / "files", tmp_path / "reports")

    def register(folder: Path) -> Artifact:
        final = tmp_path / "artifacts" / "served" / "key"
        with staging(final) as work:
            shutil.copytree(folder, work, dirs_exist_ok=True)
            artifact = publish(work, final, Origin("served", "convert", "key"))
        model = RegisteredModel("toy", artifact, "2026-03-01T10:00:00+00:00", card="# Card")
        with tracker.flow("f", {}, "", {}):
            tracker.register(model)
        return artifact

    yield register
    mlflow.set_tracking_uri(None)


def candidate() -> Any:
    """Load the registered model as its user does."""
    import mlflow

    return mlflow.pyfunc.load_model("models:/toy@candidate")


@pytest.mark.slow
def test_an_altered_folder_is_not_loaded(
    registered: Callable[[Path], Artifact], served: Path
) -> None:
    artifact = registered(served)
    weights = artifact.path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"model\.safetensors"):
        candidate()
    shutil.rmtree(artifact.path)
    with pytest.raises(ArtifactError, match="folder"):
        candidate()


def test_code_in_the_served_folder_never_runs(
    registered: Callable[[Path], Artifact], served: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(served, tmp_path / "hostile"))
    trap = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    (folder / "modeling_toy.py").write_text(f"{trap}class Toy: ...\n")
    document = json.loads((folder / "config.json").read_text())
    document["auto_map"] = {"AutoModelForCausalLM": "modeling_toy.Toy"}
    (folder / "config.json").write_text(json.dumps(document))
    registered(folder)
    model = candidate()  # by transformers' own class
    assert model.predict(REQUEST)["choices"]
    assert not (tmp_path / "ran").exists()
