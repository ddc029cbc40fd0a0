"""The served folder is compared with the live model, and its responses with those before."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tasks.evaluation.responses import order_of_pairs
from tasks.pipeline.stage import StageReport
from tests.settings import smoke_settings

NEW = 12
LENIENT = smoke_settings(
    engine="transformers", max_new_tokens=NEW, min_stop_rate=0.0, max_degenerate_rate=1.0
)


def altered(served: Path, folder: Path, factor: float) -> Path:
    """Copy the served folder, with scaled weights in one layer."""
    shutil.copytree(served, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] *= factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def run(smoke: Callable[..., StageReport]) -> Callable[..., StageReport]:
    """Run smoke_eval with everything in place; arguments override."""
    return partial(smoke, settings=LENIENT)


def test_pairs_in_order_before_training_are_those_of_the_base_s_own_head(tmp_path: Path) -> None:
    after = [2.0, 1.0, 0.0, 1.0, 3.0, 2.0, 1.0, 0.0]
    for before, share in (([], 0.5), ([1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0], 0.25)):
        metrics = order_of_pairs(tmp_path, before, after)
        assert metrics == {"eval/before": share, "eval/after": 0.75, "eval/pairs": 4.0}


def test_a_changed_layer_is_refused_and_placed(
    run: Callable[..., StageReport], served: Path, tmp_path: Path
) -> None:
    report = run(served=altered(served, tmp_path / "altered", 3.0))
    (drift,) = [check for check in report.checks if check.name.startswith("drift")]
    assert not drift.ok
    assert "the served folder" in drift.found
    assert report.notes["drift_appeared_at"].startswith("the served folder")


def test_a_stray_value_head_is_reported_before_anything_is_loaded(
    run: Callable[..., StageReport], served: Path, tmp_path: Path
) -> None:
    folder = altered(served, tmp_path / "altered", 1.0)
    (folder / "value_head.safetensors").write_bytes(b"")
    report = run(served=folder, settings=replace(LENIENT, engine="vllm"))
    assert [(c.name, c.found, c.ok) for c in report.checks] == [
        ("stray weight files", "value_head.safetensors", False)
    ]
