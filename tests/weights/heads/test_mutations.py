"""Valid folders, changed at random, give an error or the same rewards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tasks.core.errors import PlumblineError
from tasks.weights.heads.detect import detect
from tasks.weights.heads.folder import read_folder
from tests.weights.heads.making import HIDDEN, save_openrlhf, serve
from tests.weights.making import state_of

MUTATIONS = {
    "renamed": lambda t, key: t.__setitem__(f"{key}.x", t.pop(key)),
    "dropped": lambda t, key: t.pop(key),
    "empty": lambda t, key: t.__setitem__(key, torch.zeros(0)),
    "flat": lambda t, key: t.__setitem__(key, t[key].reshape(-1)),
    "longer": lambda t, key: t.__setitem__(key, torch.cat([t[key], t[key]])),
    "integers": lambda t, key: t.__setitem__(key, t[key].to(torch.int32)),
    "second head": lambda t, key: t.__setitem__("v_head.summary.weight", torch.ones(1, HIDDEN)),
    "labels": lambda t, key: t.__setitem__("score.weight", torch.ones(2, HIDDEN)),
    "stranger": lambda t, key: t.__setitem__("model.layers.7.x.weight", torch.ones(2)),
    "mean alone": lambda t, key: t.__setitem__("mean", torch.tensor([0.5])),
    "not finite": lambda t, key: t[key].view(-1).__setitem__(0, torch.nan),
    "nothing": lambda t, key: None,
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "rm"
    save_openrlhf(folder, "qwen")
    return folder


@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_an_error_or_an_identical_result(good: Path, tmp_path: Path, data: st.DataObject) -> None:
    folder, out = tmp_path / "rm", tmp_path / "out"
    for path in (folder, out):
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(good, folder)
    out.mkdir()
    tensors = load_file(good / "model.safetensors")
    name = data.draw(st.sampled_from(sorted(MUTATIONS)))
    MUTATIONS[name](tensors, data.draw(st.sampled_from(sorted(tensors))))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    try:
        serve(detect(read_folder(folder)), out)
    except PlumblineError:
        assert name != "nothing"
        assert name == "not finite" or not list(out.iterdir())
        return
    expected = load_file(good / "model.safetensors")
    state = state_of(out)
    assert state.keys() == expected.keys()
    same = {key for key in state if torch.equal(state[key], expected[key])}
    assert same == set(state), name  # flattening a norm or a bias is no change
    assert "mean" not in json.loads((out / "config.json").read_text())
