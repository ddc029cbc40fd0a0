"""Bases in 4 bits by bitsandbytes: decoded and merged bit for bit, or refused by name."""

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

from tasks.core.errors import ArtifactError, ConfigError
from tasks.pipeline.artifact import Artifact, Origin, publish, staging
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.lora import Changes
from tasks.weights.merge import plan_merge
from tasks.weights.model import model_facts
from tasks.weights.quantized.nf4 import (
    RowsAsTrained,
    as_trained,
    lost_in_4_bits,
)
from tasks.weights.quantized.packed import BLOCKSIZES, LEVELS, STATE, read_base
from tasks.weights.write import write
from tests.tiny import FAMILIES, random_model, save_tokenizer
from tests.weights.making import (
    NF4,
    Spread,
    failed,
    gathered,
    load,
    measure_here,
    merged,
    merged_by_peft,
    near_nf4,
    state_of,
    write_trained,
)
from tests.weights.packing import decode_all, pack, restored, same, write_packed

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], Any]

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
STATE_KEY = STATE + "bitsandbytes__nf4"


@pytest.fixture(scope="module")
def nf4(tmp_path_factory: pytest.TempPathFactory, qwen: Artifact) -> Path:
    """A tied model in NF4 with double quantization."""
    root = tmp_path_factory.mktemp("nf4") / "model"
    pack(qwen.path, root)
    return root


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
    facts, expected_facts = model_facts(tmp_path / "packed"), model_facts(base.path)
    assert facts.findings == ()
    assert set(facts.tensors) == set(expected_facts.tensors)
    assert set(facts.quantized) == set(expected_facts.quantized)


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


def test_layers_of_gpt2_are_transposed(tmp_path: Path) -> None:
    """transformers packs the transpose of `Conv1D`: decoded from a packed base, and in QLoRA."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    random_model(FAMILIES["gpt2"].config(hidden_size=64)).save_pretrained(plain)
    before, dequantized = state_of(plain), pack(plain, packed)
    turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    expected = {n: dequantized[n].t() if n.endswith(turned) else dequantized[n] for n in before}
    assert same(decode_all(packed, tmp_path / "decoded"), expected) == []
    assert len(same(expected, before)) == 8

    facts = model_facts(plain)
    quantization = {**NF4, "loaded_dtype": "bfloat16", "base": "dequantized"}
    sources = {"base": read_base(plain)}
    plan = plan_merge(sources["base"], facts, Changes(), quantization=quantization)
    (tmp_path / "merged").mkdir()
    write(plan, sources, tmp_path / "merged")
    assert same(state_of(tmp_path / "merged"), expected) == []


def _alter(folder: Path, change: Change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


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


DAMAGES: list[Change] = [
    _drop(".absmax"),
    _drop(STATE_KEY),
    _drop(""),
    _drop(".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", STATE_KEY),
    _put(".absmax", torch.zeros(64)),
    _put(".quant_map", torch.tensor(LEVELS["fp4"])),
    _put(STATE_KEY, torch.full((9,), 91, dtype=torch.uint8)),
    _restate(quant_type="fp4"),
    _restate(shape=[0, 64]),
    _restate(blocksize=128),
    _restate(dtype="float8"),
    _restate(nested_blocksize=None),
    _restate(nested_offset=float("inf")),
]


def test_every_damage_is_refused_by_the_name_of_its_matrix(nf4: Path, tmp_path: Path) -> None:
    for number, change in enumerate(DAMAGES):
        folder = Path(shutil.copytree(nf4, tmp_path / str(number)))
        _alter(folder, change)
        with pytest.raises(ArtifactError) as caught:
            read_base(folder)
        assert all(line.startswith(Q_PROJ) for line in caught.value.details), number


def test_other_ways_of_storing_are_refused_by_name(
    nf4: Path, tmp_path: Path, qwen: Artifact
) -> None:
    damaged = Path(shutil.copytree(nf4, tmp_path / "copy"))
    path = damaged / "config.json"
    config = json.loads(path.read_text())
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    path.write_text(json.dumps({**plain, "quantization_config": {"bits": 3}}))
    with pytest.raises(ArtifactError, match="unknown"):
        read_base(damaged)
    path.write_text(json.dumps(plain))  # it does not mention that the weights are packed
    with pytest.raises(ArtifactError, match="packed"):
        read_base(damaged)
    path.write_text(json.dumps(config))
    shutil.copy(qwen.path / "model.safetensors", damaged)  # weights that are not
    with pytest.raises(ArtifactError, match="quantization_config"):
        read_base(damaged)


@pytest.mark.parametrize(("quant_type", "double_quant"), [("nf4", True), ("fp4", False)])
def test_equal_to_a_4bit_load_by_transformers(double_quant, quant_type, llama) -> None:
    """Every Linear4bit of the loaded model, and only modules that the facts list."""
    from bitsandbytes import functional, nn
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        llama.path, dtype=torch.bfloat16, quantization_config=config
    )
    loaded = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear4bit)}
    stored = state_of(llama.path)
    assert {f"{name}.weight" for name in loaded} == set(model_facts(llama.path).quantized)
    for name, module in loaded.items():
        weight = module.weight
        theirs = functional.dequantize_4bit(weight.data, weight.quant_state)
        how = {"type": quant_type, "double_quant": double_quant}
        ours = as_trained(stored[f"{name}.weight"], how)
        assert ours.dtype == theirs.dtype
        # fp4 has two zeros; kernels without AVX-512 keep the sign, which no merge can tell.
        assert torch.equal(ours, theirs), name


def test_rows_are_those_of_the_whole() -> None:
    how = {"type": "nf4", "double_quant": True}
    for rows, columns in ((344, 128), (300, 100), (33, 7)):
        made = torch.Generator().manual_seed(0)
        weight = torch.randn(rows, columns, generator=made).to(torch.bfloat16)
        whole, some = as_trained(weight, how), RowsAsTrained(weight, how)
        for first, end in ((0, 8), (rows // 2, rows // 2 + 3), (rows - 8, rows)):
            assert torch.equal(some.rows(first, end), whole[first:end])


def test_a_merged_qlora_model_is_recognised_by_its_values(tmp_path: Path) -> None:
    for base, change, recognised in (
        ("nf4", 0.0005, True),
        ("nf4", 0.06, True),
        ("nf4", 0.0, False),  # the dequantized base itself
        ("nf4", 0.3, False),  # a change above NF4's steps
        ("bf16", 0.03, False),
        ("ternary", 0.0, False),
    ):
        folder = near_nf4(tmp_path / f"{base} {change}", change, base=base)
        text = lost_in_4_bits(read_checkpoint(folder))
        assert (text is not None) == recognised, (base, change)
        assert text is None or text.startswith("model.layers.0.mlp.up_proj.weight")


def test_a_merge_into_a_packed_base_equals_pefts(qwen: Artifact, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    with staging(tmp_path / "base") as work:
        pack(qwen.path, work)
        save_tokenizer(work)
        base = publish(work, tmp_path / "base", Origin("base", "prepare", "base"))
    run = write_trained(tmp_path / "run", base, Spread())
    adapter = gathered(tmp_path / "adapter", run, base)

    def merge(name: str, **other: Any) -> Tensors:
        (tmp_path / name).mkdir()
        report = merged(tmp_path / name, adapter, base.path, run, **other)
        assert failed(report.checks) == []
        return state_of(tmp_path / name)

    written = merge("out", score=measure_here)
    model = AutoModelForCausalLM.from_pretrained(base.path).dequantize().float()
    wanted = merged_by_peft(model, adapter).state_dict()
    assert same(written, {name: wanted[name] for name in written}) == []
    assert not hasattr(load(tmp_path / "out"), "hf_quantizer")
    with pytest.raises(ConfigError) as caught:
        merge("original", base_mode="original")
    assert "merge.base=auto" in caught.value.hint

    settings = json.loads((run / "train.json").read_text())
    (run / "train.json").write_text(json.dumps({**settings, "quantization": NF4}))
    assert same(merge("stored"), written) == [], "the stored bits win"
