from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tasks.core.errors import ArtifactError
from tasks.pipeline.artifact import Artifact
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.plan.contracts import model_facts
from tasks.weights.quantized import nf4
from tasks.weights.quantized.nf4 import (
    RowsAsTrained,
    as_trained,
    check_quantization,
    lost_in_4_bits,
)
from tests.weights.making import NF4, near_nf4, state_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen"])
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


def test_quantising_moves_the_weights_and_is_repeatable() -> None:
    weight = torch.randn(48, 40, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    once = as_trained(weight, NF4)
    assert torch.equal(once, as_trained(weight, NF4))
    error = float((once - weight).float().norm() / weight.float().norm())
    assert 0.05 < error < 0.15  # about 9 % for Gaussian weights


@pytest.mark.parametrize("fields", [{}, {"type": "int8", "double_quant": True}, {"type": "nf4"}])
def test_unknown_quantizations_are_refused(fields: dict) -> None:
    with pytest.raises(ArtifactError, match="not one of nf4, fp4"):
        check_quantization(fields)


@pytest.mark.parametrize("shape", [(344, 128), (300, 100), (33, 7)])
@pytest.mark.parametrize("double_quant", [True, False])
def test_rows_are_those_of_the_whole(shape: tuple[int, int], double_quant: bool) -> None:
    how = {"type": "nf4", "double_quant": double_quant}
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    whole, some = as_trained(weight, how), RowsAsTrained(weight, how)
    for first, end in ((0, 8), (shape[0] // 2, shape[0] // 2 + 3), (shape[0] - 8, shape[0])):
        assert torch.equal(some.rows(first, end), whole[first:end])


@pytest.mark.parametrize("change", [0.0005, 0.01, 0.03, 0.06])
def test_a_merged_qlora_model_is_recognised_by_its_values(tmp_path: Path, change: float) -> None:
    text = lost_in_4_bits(read_checkpoint(near_nf4(tmp_path / "merged", change)))
    assert text is not None
    assert text.startswith("model.layers.0.mlp.up_proj.weight is ")


@pytest.mark.parametrize(
    ("base", "change"),
    [("bf16", 0.0), ("bf16", 0.03), ("nf4", 0.0), ("nf4", 0.3), ("ternary", 0.0)],
    ids=["base", "LoRA", "dequantised", "large change", "ternary"],
)
def test_models_that_lose_nothing_in_4_bits_are_accepted(
    tmp_path: Path, base: str, change: float
) -> None:
    """A base, a LoRA model, a dequantized base, a change above NF4's steps, ternary values."""
    assert lost_in_4_bits(read_checkpoint(near_nf4(tmp_path / "model", change, base=base))) is None


def test_one_expert_of_a_layer_is_read(tmp_path: Path) -> None:
    weight = torch.randn(64, 64).bfloat16()
    names = [f"model.layers.0.mlp.experts.{n}.up_proj.weight" for n in range(8)]
    save_file({name: weight.clone() for name in names}, tmp_path / "model.safetensors")
    assert nf4._sample(read_checkpoint(tmp_path)) == [names[0]]
