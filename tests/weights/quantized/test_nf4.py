"""4-bit values computed here are those that bitsandbytes gives to training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasks.core.errors import ArtifactError
from tasks.pipeline.artifact import Artifact
from tasks.weights.adapters.changes import Changes
from tasks.weights.execute.execute import execute
from tasks.weights.families.merging import MergeSettings, plan_merge
from tasks.weights.files.opening import SourceRef, open_sources
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.plan.contracts import model_facts
from tasks.weights.plan.validate import validate
from tasks.weights.quantized.nf4 import (
    RowsAsTrained,
    as_trained,
    check_quantization,
    lost_in_4_bits,
)
from tests.weights.making import NF4, near_nf4, state_of
from tests.weights.quantized.making import pack, same

SLOW = pytest.mark.slow


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=SLOW)])
@pytest.mark.parametrize(("quant_type", "double_quant"), [("nf4", True), ("fp4", False)])
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen", marks=SLOW)])
def test_equal_to_a_4bit_load_by_transformers(
    family: str,
    double_quant: bool,
    quant_type: str,
    dtype: torch.dtype,
    request: pytest.FixtureRequest,
) -> None:
    """Every Linear4bit of the loaded model, and only modules that the facts list."""
    from bitsandbytes import functional, nn
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    base: Artifact = request.getfixturevalue(family)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=dtype,
    )
    model = AutoModelForCausalLM.from_pretrained(base.path, dtype=dtype, quantization_config=config)
    loaded = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear4bit)}
    stored = state_of(base.path)
    assert {f"{name}.weight" for name in loaded} == set(model_facts(base.path).quantized)
    for name, module in loaded.items():
        weight = module.weight
        theirs = functional.dequantize_4bit(weight.data, weight.quant_state)
        ours = as_trained(
            stored[f"{name}.weight"].to(dtype), {"type": quant_type, "double_quant": double_quant}
        )
        assert ours.dtype == theirs.dtype == dtype
        # fp4 has two zeros; kernels without AVX-512 keep the sign, which no merge can tell.
        assert torch.equal(ours, theirs), name


def test_gpt2_is_quantized_like_in_training(conv1d: Path, tmp_path: Path) -> None:
    """QLoRA on a plain base whose layers are `Conv1D`: their transposes are quantized."""
    dequantized = pack(conv1d, tmp_path / "packed")
    facts = model_facts(conv1d)
    quantization = {**NF4, "loaded_dtype": "bfloat16", "base": "dequantized"}
    wanted = MergeSettings(quantization=quantization, quantized=frozenset(facts.quantized))
    sources = open_sources({"base": SourceRef(conv1d, "base")})
    unchanged = Changes({}, {}, {}, (), (), {}, ())
    plan = plan_merge(sources["base"].tensors, facts, unchanged, {}, wanted)
    validate(plan, sources)
    (tmp_path / "out").mkdir()
    execute(plan, sources, tmp_path / "out")
    merged, plain = state_of(tmp_path / "out"), state_of(conv1d)
    turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    expected = {n: dequantized[n].t() if n.endswith(turned) else dequantized[n] for n in merged}
    assert same(merged, expected) == []
    assert len(same(merged, plain)) == 8


@pytest.mark.parametrize("fields", [{}, {"type": "int8", "double_quant": True}, {"type": "nf4"}])
def test_unknown_quantizations_are_refused(fields: dict) -> None:
    with pytest.raises(ArtifactError):
        check_quantization(fields)


@pytest.mark.parametrize("shape", [(344, 128), (300, 100), (33, 7)])
@pytest.mark.parametrize("double_quant", [True, False])
def test_rows_are_those_of_the_whole(shape: tuple[int, int], double_quant: bool) -> None:
    how = {"type": "nf4", "double_quant": double_quant}
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    whole, some = as_trained(weight, how), RowsAsTrained(weight, how)
    for first, end in ((0, 8), (shape[0] // 2, shape[0] // 2 + 3), (shape[0] - 8, shape[0])):
        assert torch.equal(some.rows(first, end), whole[first:end])


@pytest.mark.parametrize(
    ("base", "change", "recognised"),
    [
        ("nf4", 0.0005, True),
        ("nf4", 0.06, True),
        ("nf4", 0.0, False),  # the dequantized base itself
        ("nf4", 0.3, False),  # a change above NF4's steps
        ("bf16", 0.03, False),
        ("ternary", 0.0, False),
    ],
)
def test_a_merged_qlora_model_is_recognised_by_its_values(
    tmp_path: Path, base: str, change: float, recognised: bool
) -> None:
    text = lost_in_4_bits(read_checkpoint(near_nf4(tmp_path / "model", change, base=base)))
    assert (text is not None) == recognised
    assert text is None or text.startswith("model.layers.0.mlp.up_proj.weight")
