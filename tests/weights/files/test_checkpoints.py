"""Checkpoints in several files with an index: read completely, or refused with every finding."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tasks.core.errors import ArtifactError
from tasks.weights.files.folder import inspect_checkpoint
from tasks.weights.files.opening import open_model
from tasks.weights.files.reader import read_checkpoint, torch_dtype
from tasks.weights.files.source import Source
from tasks.weights.pickled.state import is_pickled_model, read_model
from tests.weights.deepspeed.conftest import read

ONE = {"a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "z": torch.ones(2)}
TWO = {"b": torch.tensor([True, False, True]), "c": torch.tensor(7.5, dtype=torch.float64)}
OUTSIDE = ["..", "../x", "/etc/passwd", "a/b.safetensors", "", "x\0y", "x" * 1000, "\ud800"]


@dataclass(frozen=True)
class Format:
    """A model that is stored in two files."""

    stem: str
    suffix: str
    save: Callable[[dict[str, torch.Tensor], Path], None]
    read: Callable[[Path], Source]

    @property
    def first(self) -> str:
        return f"{self.stem}-00001-of-00002{self.suffix}"

    @property
    def second(self) -> str:
        return f"{self.stem}-00002-of-00002{self.suffix}"

    @property
    def index(self) -> str:
        return f"{self.stem}{self.suffix}.index.json"


FORMATS = {
    "safetensors": Format("model", ".safetensors", save_file, read_checkpoint),
    "pickled": Format("pytorch_model", ".bin", torch.save, read_model),
}


@pytest.fixture(params=FORMATS)
def kind(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


@pytest.fixture
def folder(tmp_path: Path, kind: Format) -> Path:
    kind.save(ONE, tmp_path / kind.first)
    kind.save(TWO, tmp_path / kind.second)
    torch.save({"lr": 1.0}, tmp_path / "training_args.bin")  # Trainer leaves it beside every model
    for name in ("pytorch_model_fsdp.bin", "pytorch_model_1.bin", "optimizer.bin", "sampler.bin"):
        torch.save({"a": torch.zeros(2)}, tmp_path / name)  # states of accelerate
    places = dict.fromkeys(ONE, kind.first) | dict.fromkeys(TWO, kind.second)
    _index(tmp_path, kind, places)
    return tmp_path


def _index(folder: Path, kind: Format, weight_map: object) -> None:
    (folder / kind.index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _findings(folder: Path, kind: Format) -> str:
    with pytest.raises(ArtifactError) as caught:
        kind.read(folder)
    return "\n".join(caught.value.details)


def test_tensors_of_all_files_and_dtypes(folder: Path, kind: Format) -> None:
    checkpoint = open_model(folder)
    assert set(checkpoint.tensors) == {*ONE, *TWO}
    for name, tensor in (ONE | TWO).items():
        assert checkpoint.tensors[name].shape == tuple(tensor.shape)
        assert torch_dtype(checkpoint.tensors[name].dtype) == tensor.dtype
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert read(checkpoint, name) == raw
        (extent,) = checkpoint.extents(name)
        assert extent.path.name == (kind.first if name in ONE else kind.second)


def test_every_disagreement_of_index_and_files_at_once(folder: Path, kind: Format) -> None:
    gone, outside = f"gone{kind.suffix}", f"../x{kind.suffix}"
    _index(folder, kind, {"a": kind.second, "b": kind.second, "c": gone, "z": outside})
    stray = "pytorch_model.bin"
    torch.save(ONE, folder / stray)
    lines = _findings(folder, kind).splitlines()
    for thing in (outside, gone, f"a: index says {kind.second}", f"{kind.first}: ", f"{stray}: "):
        assert any(thing in line for line in lines), thing
    assert len(lines) == 5
    (folder / stray).unlink()
    kind.save(TWO | {"z": torch.zeros(1)}, folder / kind.second)
    _index(folder, kind, {"a": kind.first, "z": kind.first, "b": kind.second})
    text = _findings(folder, kind)
    assert f"z: in {kind.first}" in text  # in two files
    assert f"c: in {kind.second}" in text  # not in the index


def test_broken_indexes_and_files_are_named(folder: Path, kind: Format) -> None:
    index, victim = folder / kind.index, folder / kind.second
    good, whole = index.read_text(), victim.read_bytes()
    for text in (
        "{", "[]", '{"weight_map": 3}', "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "x.bin", "a": "y.bin"}}', "[" * 100_000,
    ):  # fmt: skip
        index.write_text(text)
        assert kind.index in _findings(folder, kind)
    for name in OUTSIDE:
        _index(folder, kind, {"a": name})
        assert "not a plain file name" in _findings(folder, kind)
    index.write_text(good)
    victim.write_bytes(whole[:-1])
    assert kind.second in _findings(folder, kind)


def test_other_folders_are_refused_by_the_name_of_their_files(tmp_path: Path) -> None:
    def refused(read: Callable[[Path], Source], name: str) -> None:
        with pytest.raises(ArtifactError) as caught:
            read(tmp_path)
        assert name in caught.value.details[0]

    refused(read_checkpoint, "model.safetensors")
    for name in ("model.safetensors", "adapter_model.safetensors"):
        save_file(ONE, tmp_path / name)
    refused(read_checkpoint, "adapter_model.safetensors")
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save(ONE, tmp_path / "pytorch_model.bin")  # safetensors win, and the pickle is a stray
    assert not is_pickled_model(tmp_path)
    refused(open_model, "pytorch_model.bin")


def test_odd_values_in_a_pickled_shard_are_named(tmp_path: Path) -> None:
    kind = FORMATS["pickled"]
    state = {"evil": Path("x"), "a": torch.empty(0), "z": 3}
    torch.save(state, tmp_path / kind.first)
    _index(tmp_path, kind, dict.fromkeys(state, kind.first))
    text = _findings(tmp_path, kind)
    for name in ("'evil'", "a: ", "'z'"):
        assert f"{kind.first}: {name}" in text


def test_a_model_folder_made_to_crash_its_reader(tmp_path: Path) -> None:
    index = tmp_path / FORMATS["safetensors"].index
    (tmp_path / "tokenizer.json").write_text("{}")
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    for name in OUTSIDE:
        if name not in ("/etc/passwd", "a/b.safetensors"):
            index.write_text(json.dumps({"weight_map": {"a": name}}))
            (problem,) = inspect_checkpoint(tmp_path).problems
            assert problem.startswith(index.name)
            assert len(problem) < 300
    index.write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    for file in (config, index):
        file.write_text('{"a":' + "[" * 100_000)
        assert any(line.startswith(file.name) for line in inspect_checkpoint(tmp_path).problems)
