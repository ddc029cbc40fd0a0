"""Mixtures of experts: routers tie, so a right merge changes experts at a few positions.

Models are of random weights. A merge that skips one expert of a light adapter moves the model by
less than such ties, so the values prove the merge: every row that `audit` and `deliver` recompute.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.audit.run import audit
from tests.audit.making import by_code
from tests.delivery.conftest import Done
from tests.tiny import tiny
from tests.weights.making import ROWS, save_tokenizer

SIZES = {
    "vocab_size": ROWS, "hidden_size": 64, "intermediate_size": 64, "tie_word_embeddings": False,
    "max_position_embeddings": 128, "num_experts_per_tok": 2, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Moe", {"head_dim": 16, "num_experts": 8, "moe_intermediate_size": 64}),
    "minimax": ("MiniMaxM2", {"head_dim": 16, "num_local_experts": 8}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
}
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def make_base(folder: Path, family: str, seed: int) -> Path:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    name, changes = FAMILIES[family]
    config = tiny(name, **{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1:
                size = 1.0 if "embed" in key else parameter.shape[-1] ** -0.5
                size *= 3 if "lm_head" in key else 1
                parameter.copy_(torch.randn(parameter.shape) * size)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def make_adapter(folder: Path, base: Path, fused: bool, seed: int) -> Path:
    """Save an adapter whose update of each matrix has about 2 % of the matrix's norm.

    A pair for every expert, as peft wrote it with transformers 4, or for the fused experts.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    random = torch.Generator().manual_seed(seed)
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    if fused:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        wrapped = get_peft_model(model, LoraConfig(**options, target_parameters=FUSED))
        with torch.no_grad():
            for key, parameter in wrapped.named_parameters():
                if "lora_" in key:
                    size = parameter.shape[-1] ** -0.5 if "lora_A" in key else 0.005
                    parameter.copy_(torch.randn(parameter.shape, generator=random) * size)
        wrapped.save_pretrained(folder)
        return folder
    tensors = {}
    for key, weight in load_file(base / "model.safetensors").items():
        module = key.removesuffix(".weight")
        if ".experts." in key or module.endswith(("q_proj", "v_proj")):
            a = torch.randn(4, weight.shape[1], generator=random) * weight.shape[1] ** -0.5
            b = torch.randn(weight.shape[0], 4, generator=random)
            b *= 0.02 * weight.float().norm() / (2 * b @ a).norm()
            tensors[f"base_model.model.{module}.lora_A.weight"] = a
            tensors[f"base_model.model.{module}.lora_B.weight"] = b
    leaves = {key.partition(".lora_")[0].rpartition(".")[2] for key in tensors}
    config = LoraConfig(**{**options, "target_modules": sorted(leaves), "task_type": "CAUSAL_LM"})
    config.base_model_name_or_path = str(base)
    config.save_pretrained(folder)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("family", "fused"),
    [("qwen3", False), ("qwen3", True), ("minimax", False), ("mixtral", True)],
)
def test_a_right_merge_passes_and_one_without_an_expert_does_not(
    here: Callable[..., Done], tmp_path: Path, family: str, fused: bool, seed: int
) -> None:
    base = make_base(tmp_path / "base", family, seed)
    adapter = make_adapter(tmp_path / "adapter", base, fused, seed)
    out, broken = tmp_path / "out", tmp_path / "broken"
    arguments = [f"source={adapter}", f"base={base}", "merge.base=original", f"out={out}"]
    here(*arguments, "merge.rounding=unbiased", engine="transformers")
    assert by_code(audit(out, base=base, adapter=adapter, values=True))["MERGE_PROVEN"] == "info"
    before, tensors = (load_file(folder / "model.safetensors") for folder in (base, out))
    skipped = {key for key in tensors if ".layers.1." in key and ".experts.3." in key}
    assert len(skipped) == 3
    tensors |= {key: before[key] for key in skipped}
    shutil.copytree(out, broken)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    (broken / "manifest.json").unlink()
    assert (
        by_code(audit(broken, base=base, adapter=adapter, values=True))["MERGE_LEFT_OUT"] == "error"
    )
