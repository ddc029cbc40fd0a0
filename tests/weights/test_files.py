"""Headers, dtypes, names and checkpoints of files: read like the libraries, or refused by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from tasks.core.errors import ArtifactError, ContractError
from tasks.weights.files import dtypes
from tasks.weights.files.dtypes import NUMPY, cast, casts, torch_dtype
from tasks.weights.files.names import live_to_peft, parse_peft, rename_all
from tasks.weights.files.reader import read_checkpoint, read_header
from tasks.weights.files.tensors import Tensors, read_all
from tasks.weights.pickled.torch_file import is_pickled_model, read_model
from tasks.weights.quantized.packed import open_model
from tests.tiny import tiny

ARRAYS = {
    "b": torch.arange(6.0).reshape(2, 3),
    "a": torch.arange(5, dtype=torch.int8),
    "empty": torch.zeros(0, 4).half(),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("header") / "good.safetensors"
    save_file(ARRAYS, path, metadata={"format": "pt"})
    return path.read_bytes()


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_altered_bytes_give_an_error_or_what_safetensors_reads(tmp_path, good, data) -> None:
    """A header that is accepted here is read the same way by the safetensors library."""
    raw = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(len(raw) // 2, len(raw)))]
    path = tmp_path / "mutated.safetensors"
    path.write_bytes(raw)
    try:
        tensors = read_header(path).tensors
    except ArtifactError:
        return
    with safe_open(path, framework="numpy") as file:
        assert set(file.keys()) == set(tensors)
        for name, info in tensors.items():
            assert info.shape == tuple(file.get_slice(name).get_shape())
            (extent,) = info.extents
            stored = bytes(raw[extent.start : extent.start + extent.nbytes])
            assert stored == file.get_tensor(name).tobytes()


def test_names_that_no_terminal_should_print_and_unknown_dtypes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for name, dtype in (("a\x1b[2J", "F64"), ("a", "C64")):
        entry = {"dtype": dtype, "shape": [1], "data_offsets": [0, 8]}
        text = json.dumps({name: entry}).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
        with pytest.raises(ArtifactError, match=path.name):
            read_header(path)


DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_values_are_judged_as_by_torch(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "_CHUNK", 4)
    inf, nan = float("inf"), float("nan")
    for values in ([], [0.0, -0.0], [0.0] * 9 + [1e-7], [1.0, inf, 2.0, -inf, 3.0, nan, 6e4]):
        tensor = torch.tensor(values, dtype=torch.float64).to(DTYPES[dtype])
        raw = tensor.view(torch.uint8).numpy()
        assert dtypes.nonfinite(raw, dtype) == int((~torch.isfinite(tensor)).sum())
        assert dtypes.all_zero(raw, dtype) == bool((tensor == 0).all())


PAIRS = [(source, target) for source in NUMPY for target in NUMPY if source != target]
SPECIAL = [
    0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0xFFFFFFFF, 0x7F7FFFFF, 0x477FEFFF, 0x477FF000,
    0x33000000, 0x33000001, 0x0, 0x80000000, 0x1, 0x3F808000, 0x3F818000, 0x3F808001,
]  # fmt: skip


def _patterns(dtype: str) -> np.ndarray:
    if dtype != "F32":
        return np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    random = np.random.default_rng(0).integers(0, 1 << 32, 1_000_001, dtype=np.uint32)
    return np.concatenate([random, np.array(SPECIAL, np.uint32)]).view(np.uint8)


@pytest.mark.parametrize("kernel", [True, False])
def test_casts_equal_torchs_except_for_nan_payloads(kernel, monkeypatch) -> None:
    """Every 16-bit pattern and a million 32-bit patterns."""
    if not kernel:
        monkeypatch.setattr(dtypes, "library", lambda: None)
    for source, target in PAIRS:
        raw = _patterns(source)
        wanted = torch.from_numpy(raw.copy()).view(DTYPES[source]).to(DTYPES[target])
        actual = torch.from_numpy(cast(raw, source, target)).view(DTYPES[target])
        nan = torch.isnan(wanted)
        assert torch.equal(torch.isnan(actual), nan)
        word = torch.int32 if target == "F32" else torch.int16
        assert torch.equal(actual.view(word)[~nan], wanted.view(word)[~nan])  # minus zero included
    assert not casts("F64", "F32")  # left to torch


LIVE = "base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight"
PEFT = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"


def test_wrappers_are_dropped_and_other_names_refused() -> None:
    wrapped = LIVE.replace("mlp.", "mlp._checkpoint_wrapped_module.")
    for name in (f"module.{LIVE}", f"module._orig_mod.{LIVE}", wrapped):
        assert live_to_peft(name) == PEFT
    head = "module.lm_head.weight"  # full training keeps the model's own names
    assert rename_all([head], adapter=False) == {head: "lm_head.weight"}
    for name in (LIVE.replace("default", "other"), LIVE.removeprefix("base_model.model.")):
        with pytest.raises(ContractError, match="default"):
            live_to_peft(name)
    for key in ("model.up_proj.lora_A.weight", "base_model.model.x.weight", PEFT + "s", ""):
        assert parse_peft(key) is None
    with pytest.raises(ContractError, match="up_proj"):
        rename_all([LIVE, f"module.{LIVE}"], adapter=True)  # two names for one key


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True, "bias": "all"},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"], "lora_bias": True},
        {"target_parameters": ["mlp.up_proj.weight"], "trainable_token_indices": [1, 2]},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_trainable_parameters_get_the_keys_that_peft_saves(settings: dict[str, object]) -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import Qwen2ForCausalLM

    config = tiny("Qwen2", num_hidden_layers=1, tie_word_embeddings=False)
    model = get_peft_model(Qwen2ForCausalLM(config), LoraConfig(r=2, **settings))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    saved = get_peft_model_state_dict(model, save_embedding_layers=False)
    keys = rename_all(trained, adapter=True)
    assert set(keys.values()) == set(saved)
    assert all(saved[key].shape == trained[name].shape for name, key in keys.items())


ONE = {"a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "z": torch.ones(2)}
TWO = {"b": torch.tensor([True, False, True]), "c": torch.tensor(7.5, dtype=torch.float64)}


class Format(NamedTuple):
    """A checkpoint in two files."""

    first: str
    second: str
    index: str
    save: Callable[..., object]
    read: Callable[[Path], Tensors]


FORMATS = {
    "safetensors": Format(
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json", save_file, read_checkpoint,
    ),
    "pickled": Format(
        "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin",
        "pytorch_model.bin.index.json", torch.save, read_model,
    ),
}  # fmt: skip


@pytest.fixture(params=FORMATS)
def kind(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


@pytest.fixture
def folder(tmp_path: Path, kind: Format) -> Path:
    kind.save(ONE, tmp_path / kind.first)
    kind.save(TWO, tmp_path / kind.second)
    for name in ("training_args.bin", "pytorch_model_fsdp.bin", "optimizer.bin", "sampler.bin"):
        torch.save({"a": torch.zeros(2)}, tmp_path / name)  # of Trainer and accelerate
    _index(tmp_path, kind, dict.fromkeys(ONE, kind.first) | dict.fromkeys(TWO, kind.second))
    return tmp_path


def _index(folder: Path, kind: Format, weight_map: object) -> None:
    (folder / kind.index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _findings(folder: Path, kind: Format) -> str:
    with pytest.raises(ArtifactError) as caught:
        kind.read(folder)
    return "\n".join(caught.value.details)


def test_tensors_of_all_files_and_dtypes(folder: Path, kind: Format) -> None:
    checkpoint = open_model(folder)
    assert set(checkpoint) == {*ONE, *TWO}
    for name, tensor in (ONE | TWO).items():
        assert checkpoint[name].shape == tuple(tensor.shape)
        assert torch_dtype(checkpoint[name].dtype) == tensor.dtype
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert read_all(checkpoint[name]).tobytes() == raw
        (extent,) = checkpoint[name].extents
        assert extent.path.name == (kind.first if name in ONE else kind.second)


def test_every_disagreement_of_index_and_files_at_once(folder: Path, kind: Format) -> None:
    gone, outside = "gone.bin", "../x.bin"
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
    assert f"z: in {kind.second}" in text  # in two files
    assert f"c: in {kind.second}" in text  # not in the index


def test_broken_indexes_and_files_are_named(folder: Path, kind: Format) -> None:
    index, victim = folder / kind.index, folder / kind.second
    good, whole = index.read_text(), victim.read_bytes()
    for text in (
        "{", "[]", '{"weight_map": 3}', "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}',
        "[" * 100_000,
    ):  # fmt: skip
        index.write_text(text)
        assert kind.index in _findings(folder, kind)
    for name in ("..", "../x", "/etc/passwd", "", "x\0y", "x" * 1000, "\ud800"):
        _index(folder, kind, {"a": name})
        assert "not a plain file name" in _findings(folder, kind)
    index.write_text(good)
    victim.write_bytes(whole[:-1])
    assert kind.second in _findings(folder, kind)


def test_other_folders_are_refused_by_the_name_of_their_files(tmp_path: Path) -> None:
    def refused(read: Callable[[Path], Tensors], name: str) -> None:
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
