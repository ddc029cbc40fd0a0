"""4-bit values computed here are those that bitsandbytes gives to training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasks.core.errors import ArtifactError
from tasks.pipeline.artifact import Artifact
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.plan.contracts import model_facts
from tasks.weights.quantized.nf4 import (
    RowsAsTrained,
    as_trained,
    check_quantization,
    lost_in_4_bits,
)
from tests.weights.making import near_nf4, state_of

BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [BF16, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("quant_type", "double_quant"), [("nf4", True), ("fp4", False)])
def test_equal_to_a_4bit_load_by_transformers(
    double_quant: bool, quant_type: str, dtype: torch.dtype, llama: Artifact
) -> None:
    """Every Linear4bit of the loaded model, and only modules that the facts list."""
    from bitsandbytes import functional, nn
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=dtype,
    )
    model = AutoModelForCausalLM.from_pretrained(
        llama.path, dtype=dtype, quantization_config=config
    )
    loaded = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear4bit)}
    stored = state_of(llama.path)
    assert {f"{name}.weight" for name in loaded} == set(model_facts(llama.path).quantized)
    for name, module in loaded.items():
        weight = module.weight
        theirs = functional.dequantize_4bit(weight.data, weight.quant_state)
        ours = as_trained(
            stored[f"{name}.weight"].to(dtype), {"type": quant_type, "double_quant": double_quant}
        )
        assert ours.dtype == theirs.dtype == dtype
        # fp4 has two zeros; kernels without AVX-512 keep the sign, which no merge can tell.
        assert torch.equal(ours, theirs), name


def test_unknown_quantizations_are_refused() -> None:
    for fields in ({}, {"type": "int8", "double_quant": True}, {"type": "nf4"}):
        with pytest.raises(ArtifactError):
            check_quantization(fields)


@pytest.mark.parametrize("double_quant", [True, False])
def test_rows_are_those_of_the_whole(double_quant: bool) -> None:
    how = {"type": "nf4", "double_quant": double_quant}
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
