from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tasks.core.errors import ArtifactError
from tasks.weights.files.reader import read_checkpoint, torch_dtype
from tests.weights.deepspeed.conftest import read

ONE = {"a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "z": torch.zeros(0, 2)}
TWO = {"b": torch.tensor([True, False, True]), "c": torch.tensor(7.5, dtype=torch.float64)}
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(ONE, tmp_path / FIRST)
    save_file(TWO, tmp_path / SECOND)
    _index(tmp_path, {"a": FIRST, "z": FIRST, "b": SECOND, "c": SECOND})
    return tmp_path


def _index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _findings(folder: Path) -> list[str]:
    with pytest.raises(ArtifactError) as caught:
        read_checkpoint(folder)
    return list(caught.value.details)


def test_tensors_of_all_shards_and_dtypes(folder: Path) -> None:
    checkpoint = read_checkpoint(folder)
    for name, tensor in (ONE | TWO).items():
        assert checkpoint.tensors[name].shape == tuple(tensor.shape)
        assert torch_dtype(checkpoint.tensors[name].dtype) == tensor.dtype
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert read(checkpoint, name) == raw
    assert checkpoint.nbytes == 12 + 3 + 8


def test_a_single_file(tmp_path: Path) -> None:
    save_file(ONE, tmp_path / "model.safetensors")
    assert dict(read_checkpoint(tmp_path).files) == {
        "a": "model.safetensors",
        "z": "model.safetensors",
    }


def test_an_empty_folder_says_what_was_looked_for(tmp_path: Path) -> None:
    assert _findings(tmp_path) == ["model.safetensors: absent"]


def test_every_disagreement_of_index_and_files_at_once(folder: Path) -> None:
    _index(folder, {"a": SECOND, "b": SECOND, "c": "gone.safetensors", "z": "../x.safetensors"})
    save_file({"v_head": torch.zeros(1)}, folder / "value_head.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert _findings(folder) == [
        "index names '../x.safetensors', which is not a plain file name",
        "gone.safetensors: absent",
        f"a: index says {SECOND}, which does not hold it",
        f"{FIRST}: stray weight file",
        "pytorch_model.bin: stray weight file",
        "value_head.safetensors: stray weight file",
    ]


def test_a_tensor_that_the_index_forgot(folder: Path) -> None:
    _index(folder, {"a": FIRST, "b": SECOND, "c": SECOND})
    assert _findings(folder) == [f"z: in {FIRST}, but not in the index"]


def test_a_tensor_in_two_files(folder: Path) -> None:
    save_file(ONE | {"b": torch.zeros(1)}, folder / FIRST)
    assert f"b: in {FIRST} and in {SECOND}" in _findings(folder)


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", '{"weight_map": 3}', "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "[" * 100_000,
    ],
)  # fmt: skip
def test_a_broken_index_is_named(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    assert any("not a readable index" in finding for finding in _findings(folder))


def test_a_truncated_shard_is_named(folder: Path) -> None:
    path = folder / SECOND
    path.write_bytes(path.read_bytes()[:-1])
    assert any(SECOND in f and "truncated" in f for f in _findings(folder))


def test_a_stray_file_beside_a_single_one(tmp_path: Path) -> None:
    for name in ("model.safetensors", "adapter_model.safetensors"):
        save_file(ONE, tmp_path / name)
    assert _findings(tmp_path) == ["adapter_model.safetensors: stray weight file"]


def test_states_of_accelerate_beside_a_model_are_no_part_of_it(tmp_path: Path) -> None:
    save_file(ONE, tmp_path / "model.safetensors")
    for name in ("pytorch_model_fsdp.bin", "pytorch_model_1.bin", "optimizer.bin", "sampler.bin"):
        torch.save({"a": torch.zeros(2)}, tmp_path / name)
    assert set(read_checkpoint(tmp_path).tensors) == {*ONE}


@pytest.mark.parametrize("name", ["..", "/etc/passwd", "a/b.safetensors", "", "x\0y"])
def test_a_file_name_with_a_path_is_refused(folder: Path, name: str) -> None:
    _index(folder, {"a": name})
    assert f"index names {name!r}, which is not a plain file name" in _findings(folder)


@pytest.mark.parametrize("name", ["x" * 1000, "\ud800"])
def test_an_impossible_file_name_is_refused(folder: Path, name: str) -> None:
    _index(folder, {"a": name})
    assert any("which is not a plain file name" in finding for finding in _findings(folder))
