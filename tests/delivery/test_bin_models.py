"""Full models in several `.bin` files give the same result as in safetensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.delivery.conftest import Done
from tests.weights.making import state_of

Run = Callable[..., Done]
INDEX = "pytorch_model.bin.index.json"


@pytest.fixture
def pickled(base: Path, tmp_path: Path) -> Path:
    """The base, saved as transformers 4 does with `safe_serialization=False`."""
    folder = Path(
        shutil.copytree(base, tmp_path / base.name, ignore=shutil.ignore_patterns("*.safetensors*"))
    )
    state = list(state_of(base).items())
    places = {}
    for number, part in enumerate((state[::2], state[1::2]), 1):
        name = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save(dict(part), folder / name)
        places |= {key: name for key, _ in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def test_is_served_as_safetensors(either: Run, pickled: Path, base: Path, tmp_path: Path) -> None:
    done = either(f"source={pickled}", f"out={tmp_path / 'out'}")
    assert done.code == 0, done.output
    assert "a full Qwen2ForCausalLM (2 files of pytorch_model-*.bin)" in done.output
    actual, wanted = state_of(tmp_path / "out"), state_of(base)
    assert actual.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in actual.items())
    assert not list((tmp_path / "out").glob("*.bin"))


def test_is_merged_into(
    here: Run, pickled: Path, base: Path, adapter: Path, tmp_path: Path
) -> None:
    for name, folder in (("bin", pickled), ("safe", base)):
        done = here(
            f"source={adapter}", f"base={folder}", "merge.base=original", f"out={tmp_path / name}"
        )
        assert done.code == 0, done.output
    actual, wanted = state_of(tmp_path / "bin"), state_of(tmp_path / "safe")
    assert actual.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in actual.items())


def test_an_index_that_leads_out_of_the_folder_is_refused(
    here: Run, pickled: Path, tmp_path: Path
) -> None:
    document = json.loads((pickled / INDEX).read_text())
    key = next(iter(document["weight_map"]))
    document["weight_map"][key] = "../elsewhere.bin"
    (pickled / INDEX).write_text(json.dumps(document))
    done = here(f"source={pickled}", f"out={tmp_path / 'out'}")
    assert done.code != 0
    assert f"INDEX_PATH {INDEX}: ../elsewhere.bin" in done.output
    assert not (tmp_path / "out").exists()
