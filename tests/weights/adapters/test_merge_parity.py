from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.config import MontecloraConfig, VeloraConfig

from tasks.weights.adapters.changes import changes
from tasks.weights.adapters.live import live_model
from tasks.weights.adapters.read import read_adapter
from tasks.weights.adapters.values import value_findings
from tests.weights.adapters.making import (
    base_model,
    compare,
    opened,
    our_merge,
    peft_merge,
    quiet,
    save,
    train,
)

ALL = "all-linear"
QV = ["q_proj", "v_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {"target_modules": ALL}),
    "rslora": ("llama", {"target_modules": QV, "use_rslora": True}),
    "regex": ("llama", {"target_modules": r".*\.1\..*(up|down)_proj"}),
    "default targets": ("qwen2", {}),
    "patterns": (
        "llama",
        {
            "target_modules": ALL,
            "rank_pattern": {
                "q_proj": 3,
                r"layers\.1\.mlp\.up_proj": 7,
                "^model.layers.0.mlp.*": 2,
            },
            "alpha_pattern": {"v_proj": 5, r".*\.0\.self_attn\.k_proj": 1.5},
        },
    ),
    "rslora with patterns": (
        "llama",
        {
            "target_modules": ALL,
            "use_rslora": True,
            "rank_pattern": {"q_proj": 3, "mlp.up_proj": 7},
            "alpha_pattern": {r"layers\.1\..*_proj": 5},
        },
    ),
    "velora": ("llama", {"target_modules": QV, "velora_config": VeloraConfig(num_groups=4)}),
    "monteclora": ("llama", {"target_modules": QV, "monteclora_config": MontecloraConfig()}),
    "layers": ("llama", {"target_modules": QV, "layers_to_transform": 1}),
    "layers of a pattern": (
        "llama",
        {"target_modules": QV, "layers_to_transform": [0], "layers_pattern": "layers"},
    ),
    "excluded": ("llama", {"target_modules": ALL, "exclude_modules": ["k_proj", "0.mlp.up_proj"]}),
    "excluded by regex": ("llama", {"target_modules": QV, "exclude_modules": r".*\.0\..*"}),
    "dora": ("llama", {"target_modules": ALL, "use_dora": True}),
    "dora conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "use_dora": True}),
    "dora embedding": ("llama", {"target_modules": ["embed_tokens"], "use_dora": True}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "embedding and head": ("llama", {"target_modules": ["embed_tokens", "lm_head"]}),
    "conv1d": ("gpt2", {"target_modules": ALL}),
    "conv1d, said so": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "linear, said to be turned": ("llama", {"target_modules": QV, "fan_in_fan_out": True}),
    "conv1d with biases": ("gpt2", {"target_modules": ["c_attn"], "bias": "all"}),
    "biases of targets": ("biased", {"target_modules": ALL, "bias": "lora_only"}),
    "biases": ("biased", {"target_modules": QV, "bias": "all"}),
    "lora bias": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "lora_bias": True}),
    "both biases": (
        "biased",
        {"target_modules": QV, "lora_bias": True, "bias": "lora_only"},
    ),
    "experts": ("mixtral", {"target_modules": [], "target_parameters": EXPERTS}),
    "experts, one tensor": (
        "mixtral",
        {"target_modules": QV, "target_parameters": EXPERTS[1:], "rank_pattern": {EXPERTS[1]: 2}},
    ),
    "experts, patterns": (
        "mixtral",
        {
            "target_modules": [],
            "target_parameters": EXPERTS,
            "use_rslora": True,
            "rank_pattern": {"experts.gate_up_proj": 3, "mlp.experts": 9},
            "alpha_pattern": {r"layers\.1\.mlp\.experts\.down_proj": 9},
        },
    ),
    "experts, transposed": (
        "llama4",
        {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
    "a matrix by its name": (
        "llama",
        {"target_modules": [], "target_parameters": ["q_proj.weight"]},
    ),
    "experts by the old names": ("mixtral", {"target_modules": ["q_proj", "w1", "w2", "w3"]}),
    "saved": ("llama", {"target_modules": QV, "modules_to_save": ["lm_head", "embed_tokens"]}),
    "saved norms": ("llama", {"target_modules": ALL, "modules_to_save": ["norm"]}),
    "saved layer": ("llama", {"target_modules": ALL, "modules_to_save": ["mlp"]}),
    "tokens": ("llama", {"target_modules": QV, "trainable_token_indices": [3, 95, 7]}),
    "tokens, both": (
        "llama",
        {
            "target_modules": QV,
            "trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [90]},
        },
    ),
    "tied tokens": ("qwen2", {"target_modules": QV, "trainable_token_indices": [3, 95, 7]}),
    "tied tokens, tied": (
        "qwen2",
        {"target_modules": QV, "trainable_token_indices": [3, 95], "ensure_weight_tying": True},
    ),
    "tied tokens, both": (
        "qwen2",
        {
            "target_modules": QV,
            "trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [1, 2]},
        },
    ),
    "tied, saved together": (
        "qwen2",
        {"target_modules": QV, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "tied, saved apart": (
        "qwen2",
        {"target_modules": QV, "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "tied, one saved": ("qwen2", {"target_modules": QV, "modules_to_save": ["lm_head"]}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_peft(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    model = base_model(family)
    with quiet():
        config = LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **settings)
    folder = save(train(model, config), tmp_path / "adapter")
    compare(our_merge(model, opened(folder)), peft_merge(model, folder), model.state_dict())


def test_bf16_adapter_and_base(tmp_path: Path) -> None:
    """An adapter trained in bf16 is merged in fp32, as always."""
    model = base_model("llama")
    wrapped = train(model, LoraConfig(r=4, lora_alpha=8, target_modules=ALL))
    folder = save(wrapped.to(torch.bfloat16), tmp_path / "adapter")
    assert {info.dtype for info in read_adapter(folder).tensors.tensors.values()} == {"BF16"}
    compare(our_merge(model, opened(folder)), peft_merge(model, folder), model.state_dict())


def test_pickled_adapter(tmp_path: Path) -> None:
    model = base_model("llama")
    wrapped = train(model, LoraConfig(r=4, lora_alpha=8, target_modules=QV, use_dora=True))
    safe = save(wrapped, tmp_path / "safe")
    pickled = save(wrapped, tmp_path / "pickled", safe_serialization=False)
    assert not list(pickled.glob("*.safetensors"))
    ours = our_merge(model, opened(pickled))
    compare(ours, peft_merge(model, safe), model.state_dict())
    assert not list(value_findings(read_adapter(pickled)))


@pytest.mark.parametrize("bias", ["none", "all"])
def test_reward_model(bias: str, tmp_path: Path) -> None:
    """peft stores the score head of a sequence classifier without being asked to."""
    model = base_model("llama", head="SequenceClassification")
    config = LoraConfig(r=4, lora_alpha=8, target_modules=ALL, task_type="SEQ_CLS", bias=bias)
    folder = save(train(model, config), tmp_path / "adapter")
    total = changes(opened(folder), live_model(model))
    assert total.replacements["score.weight"] == "adapter:base_model.model.score.weight"
    compare(our_merge(model, opened(folder)), peft_merge(model, folder), model.state_dict())


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.5, -1.5)])
def test_several_adapters(weights: tuple[float, float], tmp_path: Path) -> None:
    model = base_model("llama")
    variants = ({"target_modules": ALL}, {"target_modules": QV, "use_rslora": True})
    folders = [
        save(train(model, LoraConfig(r=3 + i, lora_alpha=8, **settings), seed=i), tmp_path / str(i))
        for i, settings in enumerate(variants)
    ]
    adapters = [(read_adapter(folder, f"a{i}"), weights[i]) for i, folder in enumerate(folders)]
    theirs = peft_merge(model, *folders, weights=weights)
    compare(our_merge(model, adapters), theirs, model.state_dict())


def test_several_adapters_equal_the_concatenated_one(tmp_path: Path) -> None:
    """`add_weighted_adapter("cat")` computes one longer product, so rounding may differ."""
    from peft import PeftModel

    model = base_model("llama")
    folders = [
        save(
            train(model, LoraConfig(r=4, lora_alpha=8, target_modules=QV), seed=i),
            tmp_path / str(i),
        )
        for i in range(2)
    ]
    ours = our_merge(
        model, [(read_adapter(f, f.name), w) for f, w in zip(folders, (0.7, 2), strict=True)]
    )
    with quiet():
        both = PeftModel.from_pretrained(copy.deepcopy(model), folders[0], adapter_name="x")
        both.load_adapter(folders[1], adapter_name="y")
        both.add_weighted_adapter(["x", "y"], [0.7, 2], "z", combination_type="cat")
        both.set_adapter("z")
        theirs = both.merge_and_unload().state_dict()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor.float(), theirs[name], rtol=2**-8, atol=1e-6)
