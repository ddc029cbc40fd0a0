"""Models in several `.bin` files and an index: read completely, or refused with every finding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.core.errors import ArtifactError
from tasks.weights.files.opening import open_model
from tasks.weights.pickled.state import is_pickled_model, read_model
from tests.weights.deepspeed.conftest import read

FIRST, SECOND = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
INDEX = "pytorch_model.bin.index.json"
ONE = {"a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "z": torch.ones(2)}
TWO = {"b": torch.tensor([True, False, True]), "c": torch.tensor(7.5, dtype=torch.float64)}


def index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.save(ONE, tmp_path / FIRST)
    torch.save(TWO, tmp_path / SECOND)
    torch.save({"lr": 1.0}, tmp_path / "training_args.bin")  # Trainer leaves it beside every model
    index(tmp_path, {"a": FIRST, "z": FIRST, "b": SECOND, "c": SECOND})
    return tmp_path


def findings(folder: Path) -> list[str]:
    with pytest.raises(ArtifactError) as caught:
        read_model(folder)
    assert caught.value.hint
    return list(caught.value.details)


def test_tensors_of_all_files_equal_torchs(folder: Path) -> None:
    assert is_pickled_model(folder)
    source = open_model(folder)
    assert list(source.tensors) == [*ONE, *TWO]
    for name, want in (ONE | TWO).items():
        assert source.tensors[name].shape == tuple(want.shape)
        assert read(source, name) == want.reshape(-1).view(torch.uint8).numpy().tobytes()
        (extent,) = source.extents(name)
        assert extent.path.name == (FIRST if name in ONE else SECOND)


def test_shards_of_transformers_are_read(tmp_path: Path) -> None:
    """Read shards and index as transformers 4 wrote them with `safe_serialization=False`."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from transformers import AutoModelForCausalLM

    from tests.weights.making import small_config

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config("qwen"), dtype=torch.bfloat16)
    state = model.state_dict()
    plan = split_torch_state_dict_into_shards(
        state, filename_pattern="pytorch_model{suffix}.bin", max_shard_size=20_000
    )
    for file, names in plan.filename_to_tensors.items():
        torch.save({name: state[name] for name in names}, tmp_path / file)
    index(tmp_path, plan.tensor_to_filename)
    model.config.save_pretrained(tmp_path)
    assert len(plan.filename_to_tensors) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    source = open_model(tmp_path)
    for name in source.tensors:
        assert read(source, name) == loaded[name].reshape(-1).view(torch.uint8).numpy().tobytes()
    assert set(state) - set(source.tensors) <= {"lm_head.weight"}  # tied


def test_every_disagreement_of_index_and_files_at_once(folder: Path) -> None:
    index(folder, {"a": SECOND, "b": SECOND, "c": "gone.bin", "z": "../x.bin"})
    torch.save(ONE, folder / "pytorch_model.bin")
    assert findings(folder) == [
        "index names '../x.bin', which is not a plain file name",
        "gone.bin: absent",
        f"a: index says {SECOND}, which does not hold it",
        f"{FIRST}: stray weight file",
        "pytorch_model.bin: stray weight file",
    ]


@pytest.mark.parametrize("name", ["/etc/passwd", "..", "a/b.bin", "", "x\0y", "x" * 1000])
def test_names_that_lead_elsewhere_are_refused(folder: Path, name: str) -> None:
    index(folder, {"a": name})
    assert any("which is not a plain file name" in line for line in findings(folder))


def test_a_tensor_that_the_index_forgot_or_two_files_hold(folder: Path) -> None:
    torch.save(TWO | {"z": torch.zeros(1)}, folder / SECOND)
    index(folder, {"a": FIRST, "z": FIRST, "b": SECOND})
    assert findings(folder) == [
        f"z: in {FIRST} and in {SECOND}",
        f"c: in {SECOND}, but not in the index",
    ]


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": {"a": "x.bin", "a": "y.bin"}}', "[" * 100_000]
)
def test_a_broken_index_is_named(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    assert any(f"{INDEX}: not a readable index" in finding for finding in findings(folder))


def test_findings_name_their_file(folder: Path) -> None:
    torch.save({"a": torch.empty(0), "z": 3}, folder / FIRST)
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-50])
    lines = findings(folder)
    assert f"{FIRST}: a: has no elements, shape [0]" in lines
    assert f"{FIRST}: 'z': not a tensor" in lines
    assert any(SECOND in line and "truncated" in line for line in lines)


class Attack:
    """Object that touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_code_in_a_shard_is_never_run(folder: Path, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    torch.save(TWO | {"evil": Attack(touched)}, folder / SECOND)
    assert f"{SECOND}: 'evil': not a tensor" in findings(folder)
    assert not touched.exists()
    torch.load(folder / SECOND, weights_only=False)  # the attack is real
    assert touched.exists()


def test_safetensors_in_the_folder_win_and_the_pickles_are_strays(folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(ONE, folder / "model.safetensors")
    assert not is_pickled_model(folder)
    with pytest.raises(ArtifactError, match="stray weight file"):
        open_model(folder)
