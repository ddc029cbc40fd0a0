"""Bases packed in 4 bits by bitsandbytes: decoded bit for bit, or refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tasks.core.errors import ArtifactError
from tasks.pipeline.artifact import Artifact
from tasks.weights.adapters.changes import Changes
from tasks.weights.execute.execute import execute
from tasks.weights.execute.journal import identify
from tasks.weights.families.merging import MergeSettings, plan_merge
from tasks.weights.files.opening import SourceRef, open_sources
from tasks.weights.plan.contracts import model_facts
from tasks.weights.plan.operations import Plan
from tasks.weights.plan.validate import validate
from tasks.weights.quantized.config_fields import is_packed, stored
from tasks.weights.quantized.packed import BLOCKSIZES, LEVELS, STATE
from tasks.weights.quantized.source import read_base
from tests.weights.families.making import FAMILIES, make_model
from tests.weights.making import NF4, state_of
from tests.weights.quantized.making import decode_all, pack, restored, same, write_packed

Change = Callable[[dict[str, torch.Tensor]], Any]

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
STATE_KEY = STATE + "bitsandbytes__nf4"


@pytest.fixture(scope="module")
def nf4(tmp_path_factory: pytest.TempPathFactory, qwen: Artifact) -> Path:
    """A tied model in NF4 with double quantization."""
    root = tmp_path_factory.mktemp("nf4") / "model"
    pack(qwen.path, root)
    return root


@pytest.fixture
def damaged(nf4: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(nf4, tmp_path / "copy"))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"kind": "nf4", "double": True, "max_shard_size": "30KB"}),
        ("qwen", {"kind": "fp4", "double": False, "storage": torch.bfloat16}),
    ],
)
def test_every_tensor_equals_transformers_dequantization(
    family: str, options: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    base: Artifact = request.getfixturevalue(family)
    expected = pack(base.path, tmp_path / "packed", **options)
    decoded = decode_all(tmp_path / "packed", tmp_path / "out")
    plain = state_of(base.path)
    assert same(decoded, {name: expected[name] for name in plain}) == []
    assert 0 < len(same(decoded, plain)) < len(plain)  # really packed, and not all of it


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shape=st.lists(st.integers(1, 30), min_size=1, max_size=3).filter(lambda s: prod(s) % 2 == 0),
    kind=st.sampled_from(["nf4", "fp4"]),
    double=st.booleans(),
    blocksize=st.sampled_from(BLOCKSIZES[:-2]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    seed=st.integers(0, 99),
)
def test_any_matrix_equals_bitsandbytes_dequantization(
    tmp_path_factory: pytest.TempPathFactory,
    shape: list[int],
    kind: str,
    double: bool,
    blocksize: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Vectors, stacks, rows that no block size divides, and every dtype that bitsandbytes packs.

    bitsandbytes decodes one long row: its AVX-512 kernel errs if rows end within blocks.
    """
    folder = tmp_path_factory.mktemp("matrix")
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    options = {"blocksize": blocksize, "quant_type": kind, "compress_statistics": double}
    write_packed(folder, {"one.weight": matrix}, **options)
    expected = restored(folder)
    assert expected["one.weight"].shape == matrix.shape
    assert same(decode_all(folder, folder / "out"), expected) == []


def test_rows_that_end_within_blocks_have_the_error_of_4_bits(tmp_path: Path) -> None:
    """The error of 4 bits is 9 to 11 %; bitsandbytes' kernel uses wrong scales here: 25 %."""
    for shape in ((5, 7), (96, 96), (3, 4304)):
        folder = tmp_path / str(shape)
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        write_packed(folder, {"one.weight": matrix}, blocksize=2048, quant_type="nf4")
        decoded = decode_all(folder, folder / "out")["one.weight"].float()
        assert float((decoded - matrix.float()).norm() / matrix.float().norm()) < 0.13


def test_layers_of_gpt2_are_transposed(tmp_path: Path) -> None:
    """transformers packs the transpose of `Conv1D`: decoded from a packed base, and in QLoRA."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    make_model(FAMILIES["gpt2"].config(n_embd=64)).save_pretrained(plain)
    before, dequantized = state_of(plain), pack(plain, packed)
    turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    expected = {n: dequantized[n].t() if n.endswith(turned) else dequantized[n] for n in before}
    assert same(decode_all(packed, tmp_path / "decoded"), expected) == []
    assert len(same(expected, before)) == 8

    facts = model_facts(plain)
    quantization = {**NF4, "loaded_dtype": "bfloat16", "base": "dequantized"}
    settings = MergeSettings(quantization=quantization, quantized=frozenset(facts.quantized))
    sources = open_sources({"base": SourceRef(plain, "base")})
    unchanged = Changes({}, {}, {}, (), (), {}, ())
    plan = plan_merge(sources["base"].tensors, facts, unchanged, {}, settings)
    validate(plan, sources)
    (tmp_path / "merged").mkdir()
    execute(plan, sources, tmp_path / "merged")
    assert same(state_of(tmp_path / "merged"), expected) == []


def test_a_packed_base_looks_like_the_model_that_was_packed(nf4: Path, qwen: Artifact) -> None:
    packed, plain = read_base(nf4), read_base(qwen.path)
    described = {k: (tuple(t.shape), t.dtype) for k, t in packed.tensors.items()}
    assert described == {k: (tuple(t.shape), t.dtype) for k, t in plain.tensors.items()}
    assert sum(len(packed.extents(key)) for key in packed.tensors) == len(packed.whole.tensors)
    facts, expected = model_facts(nf4), model_facts(qwen.path)
    assert facts.findings == ()
    assert set(facts.tensors) == set(expected.tensors)
    assert set(facts.quantized) == set(expected.quantized)
    early = {"quantization_config": {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float16"}}
    assert is_packed(early)
    assert stored({"quantization_config": {}}) is None


def _alter(folder: Path, change: Change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_changed_scales_change_the_identity_of_the_input(damaged: Path) -> None:
    """An interrupted run is not continued if only a tensor beside a matrix has changed."""
    identities = set()
    for _ in range(2):
        sources = open_sources({"base": SourceRef(damaged, "base")})
        identities.add(identify(Plan(()), sources, "model"))
        _alter(damaged, lambda tensors: tensors[Q_PROJ + ".absmax"].add_(1))
    assert len(identities) == 2


def _drop(*names: str) -> Change:
    return lambda tensors: [tensors.pop(Q_PROJ + name) for name in names]


def _put(name: str, value: torch.Tensor) -> Change:
    return lambda tensors: tensors.update({Q_PROJ + name: value})


def _restate(**changes: Any) -> Change:
    """Change fields in the JSON of one matrix; None removes a field."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        (name,) = (key for key in tensors if key.startswith(Q_PROJ + STATE))
        state = {**json.loads(bytes(tensors[name].tolist())), **changes}
        state = {key: value for key, value in state.items() if value is not None}
        tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change


BYTES = torch.uint8
DAMAGES: list[tuple[Change, str]] = [
    (_drop(".absmax"), "absmax"),
    (_drop(".quant_map"), "quant_map"),
    (_drop(".nested_absmax"), "nested_absmax"),
    (_drop(".nested_quant_map"), "nested_quant_map"),
    (_drop(STATE_KEY), "quant_state"),
    (_drop(""), ".absmax"),
    (
        _drop(".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", STATE_KEY),
        "U8 [2048, 1]",
    ),
    (_put("", torch.zeros(2047, 1, dtype=BYTES)), "2047"),
    (_put(".absmax", torch.zeros(63, dtype=BYTES)), "U8 [63]"),
    (_put(".absmax", torch.zeros(64)), "F32 [64]"),
    (_put(".nested_quant_map", torch.zeros(255)), "F32 [255]"),
    (_put(".quant_map", torch.tensor(LEVELS["fp4"])), "quant_map"),
    (_put(STATE_KEY, torch.full((9,), 91, dtype=BYTES)), "not readable"),
    (_put(STATE_KEY, torch.tensor([91, 93], dtype=BYTES)), "not readable"),
    (_put(STATE + "bitsandbytes__fp4", torch.zeros(4, dtype=BYTES)), "bitsandbytes__fp4"),
    (_restate(quant_type="fp4"), "quant_type"),
    (_restate(shape=[64, 32]), "2048"),
    (_restate(shape=None), "shape"),
    (_restate(shape=[0, 64]), "shape"),
    (_restate(blocksize=48), "blocksize"),
    (_restate(blocksize=64.0), "blocksize"),
    (_restate(blocksize=128), "U8 [32]"),
    (_restate(dtype="float8"), "dtype"),
    (_restate(nested_blocksize=None), "nested_blocksize"),
    (_restate(nested_offset=None), "nested_offset"),
    (_restate(nested_offset=float("inf")), "nested_offset"),
    (_restate(nested_dtype="bfloat16"), "float32"),
]


def test_every_damage_is_refused_by_the_name_of_its_matrix(
    nf4: Path, damaged: Path, tmp_path: Path
) -> None:
    missed = []
    for number, (change, thing) in enumerate(DAMAGES):
        folder = Path(shutil.copytree(nf4, tmp_path / str(number)))
        _alter(folder, change)
        with pytest.raises(ArtifactError) as caught:
            read_base(folder)
        if not any(Q_PROJ in line and thing in line for line in caught.value.details):
            missed.append((number, thing, caught.value.details))
    assert missed == []
    v_proj = Q_PROJ.replace("q_proj", "v_proj")
    _alter(damaged, lambda tensors: [tensors.pop(Q_PROJ + ".absmax"), tensors.pop(v_proj)])
    with pytest.raises(ArtifactError) as caught:
        read_base(damaged)
    assert sorted(line.partition(":")[0] for line in caught.value.details) == [Q_PROJ, v_proj]


def test_other_ways_of_storing_are_refused_by_name(damaged: Path, qwen: Artifact) -> None:
    path = damaged / "config.json"
    config = json.loads(path.read_text())
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    for fields, thing in (
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "8 bits"),
        ({"_load_in_8bit": True, "_load_in_4bit": False}, "8 bits"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"bits": 3}, "unknown"),
    ):
        path.write_text(json.dumps({**plain, "quantization_config": fields}))
        with pytest.raises(ArtifactError, match=thing):
            read_base(damaged)
    path.write_text(json.dumps(plain))  # it does not mention that the weights are packed
    with pytest.raises(ArtifactError, match="packed"):
        read_base(damaged)
    path.write_text(json.dumps(config))
    shutil.copy(qwen.path / "model.safetensors", damaged)  # weights that are not
    with pytest.raises(ArtifactError, match="quantization_config"):
        read_base(damaged)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_mutated_folder_is_refused_or_decodes_the_same(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A tensor that is lost, resized, retyped or renamed is always noticed."""
    folder = tmp_path_factory.mktemp("mutated")
    matrix = torch.randn(24, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    double = data.draw(st.booleans())
    write_packed(folder, {"a.weight": matrix, "b.weight": matrix}, compress_statistics=double)
    expected = restored(folder)
    tensors = load_file(folder / "model.safetensors")
    name = data.draw(st.sampled_from(sorted(tensors)))
    kind = data.draw(st.sampled_from(["drop", "shorten", "widen", "retype", "rename", "reshape"]))
    tensor = tensors.pop(name)
    other = torch.float64 if tensor.dtype != torch.float64 else torch.float32
    changed = {
        "shorten": {name: tensor.reshape(-1)[:-1].clone()},
        "widen": {name: torch.cat([tensor.reshape(-1), tensor.reshape(-1)[:1]])},
        "retype": {name: tensor.to(other)},
        "rename": {name.replace(".weight", ".wait"): tensor},
        "reshape": {name: tensor.reshape(1, -1).clone()},
    }
    save_file({**tensors, **changed.get(kind, {})}, folder / "model.safetensors")
    if kind == "reshape":
        assert same(decode_all(folder, folder / "out"), expected) == []
        return
    with pytest.raises(ArtifactError):
        decode_all(folder, folder / "out")
