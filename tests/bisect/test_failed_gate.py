"""A failed drift gate says where the models part, and stays the error that is reported."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tasks.bisect.run import Explainer
from tasks.drift.fingerprint import PROFILES
from tasks.evaluation.planned import Measuring
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tests.serving.models import live_fingerprint, load, write_model

LOG = logging.getLogger("tests.bisect")
PROBES = [list(range(3, 40)), list(range(50, 90))]


@pytest.mark.slow
def test_measuring_names_the_module(tmp_path: Path) -> None:
    """A stage that measures drift adds the module to its hint; a failing bisection adds a line."""
    before, trained, out = write_model(tmp_path / "a", 1), tmp_path / "trained", tmp_path / "b"
    shutil.copytree(before, out)
    tensors = load_file(out / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] *= 0
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    trained.mkdir()
    live_fingerprint(load(before), PROBES).save(trained / "fingerprint.fp")
    logs = tmp_path / "logs"
    logs.mkdir()
    with ReferenceScorer(log=LOG, log_path=logs / "reference.log") as scorer:
        measuring = Measuring(
            scorer.measure, trained, PROFILES["relaxed"], cause="the first cause",
            before=ModelRef(before), explain=Explainer(logs),
        )  # fmt: skip
        _, right = measuring.take(ModelRef(before), tmp_path)
        assert right.ok
        assert not (logs / "bisect.json").exists(), "nothing has failed"
        _, wrong = measuring.take(ModelRef(out), tmp_path)
    assert not wrong.ok
    assert "they part at model.layers.1.mlp.down_proj" in wrong.found
    assert "zero" in wrong.found
    assert "the first cause" in wrong.hint
    report = json.loads((logs / "bisect.json").read_text())
    assert report["first"]["module"] == "model.layers.1.mlp.down_proj"
    line = Explainer(logs)(ModelRef(tmp_path / "none"), ModelRef(out), PROBES, "transformers")
    assert line.startswith("bisect: they cannot be compared")
