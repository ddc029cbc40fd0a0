"""Keys and shapes that we expect of an adapter are those of peft, for many families."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.weights.adapters.config import parse_config
from tasks.weights.adapters.live import LiveModel, live_model
from tasks.weights.adapters.pieces import Contract
from tests.weights.adapters.making import SIZES, config_of, quiet

FAMILIES = (
    "llama", "qwen2", "gpt2", "mixtral", "llama4", "falcon", "neox", "phi3", "gemma3", "qwen3_moe",
    "deepseek_v3", "qwen2_5_vl", "reward",
)  # fmt: skip

FUSED = ("mixtral", "qwen3_moe", "deepseek_v3")
"""Families whose experts "all-linear" means, though they are single parameters."""


def _config(family: str) -> Any:
    import transformers as tf

    few = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    experts = {"moe_intermediate_size": 16, "num_experts": 3, "num_experts_per_tok": 2}
    match family:
        case "falcon":
            return tf.FalconConfig(
                vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
            )
        case "neox":
            return tf.GPTNeoXConfig(**few)
        case "phi3":
            return tf.Phi3Config(**SIZES, pad_token_id=0)
        case "gemma3":
            return tf.Gemma3TextConfig(**SIZES, head_dim=8)
        case "qwen3_moe":
            return tf.Qwen3MoeConfig(**SIZES, **experts, head_dim=8)
        case "deepseek_v3":
            ranks = {
                "q_lora_rank": 8,
                "kv_lora_rank": 8,
                "qk_rope_head_dim": 4,
                "qk_nope_head_dim": 4,
            }
            routed = {
                "n_routed_experts": 4,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
            }
            return tf.DeepseekV3Config(
                **{**SIZES, "num_key_value_heads": 4}, **ranks, **routed, v_head_dim=8
            )
        case "qwen2_5_vl":
            vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
            rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
            text = {**SIZES, "rope_parameters": rope}
            return tf.Qwen2_5_VLConfig(
                text_config=text, vision_config={**vision, "out_hidden_size": 32}
            )
        case "reward":
            return config_of("llama")
        case _:
            return config_of(family)


def _fresh(family: str) -> Any:
    import transformers as tf

    head = {"reward": "SequenceClassification", "qwen2_5_vl": "ImageTextToText"}.get(
        family, "CausalLM"
    )
    with torch.device("meta"), quiet():
        return getattr(tf, f"AutoModelFor{head}").from_config(_config(family), dtype=torch.bfloat16)


def _theirs(
    family: str, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Return the configuration and the state dict that peft would save."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    kind = "SEQ_CLS" if family == "reward" else "CAUSAL_LM"
    with quiet(), torch.device("meta"):
        config = LoraConfig(r=4, lora_alpha=6, task_type=kind, init_lora_weights=False, **options)
        wrapped = get_peft_model(_fresh(family), config)
        state = get_peft_model_state_dict(wrapped)
    raw = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
    return raw, {name: tuple(tensor.shape) for name, tensor in state.items()}


class _Header:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.dtype = shape, "BF16"


def _ours(
    live: LiveModel, raw: dict[str, Any], file_tensors: dict[str, tuple[int, ...]]
) -> Contract:
    config, findings = parse_config({**raw, "peft_type": "LORA"})
    assert not findings
    return Contract(config, live, {key: _Header(shape) for key, shape in file_tensors.items()})


OPTIONS: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "biases": {"target_modules": "all-linear", "bias": "all"},
    "own biases": {"target_modules": "all-linear", "bias": "lora_only"},
    "norms saved": {"target_modules": "all-linear", "modules_to_save": ["norm"]},
}


@pytest.mark.parametrize(
    ("family", "case"),
    # peft has no DoRA on fused experts
    [(f, case) for f in FAMILIES for case in OPTIONS if not (case == "dora" and f in FUSED)],
)
def test_same_keys_and_shapes(family: str, case: str) -> None:
    raw, theirs = _theirs(family, OPTIONS[case])
    contract = _ours(live_model(_fresh(family)), raw, theirs)
    assert not contract.findings
    assert {key: shape for piece in contract.pieces for key, shape in piece.wants.items()} == theirs


def test_all_linear_as_a_shorthand() -> None:
    """A configuration that was saved before use still contains the shorthand."""
    raw, theirs = _theirs("reward", {"target_modules": "all-linear"})
    contract = _ours(live_model(_fresh("reward")), {**raw, "target_modules": "all-linear"}, theirs)
    assert {key for piece in contract.pieces for key in piece.wants} == set(theirs)


LIVE = live_model(_fresh("llama"))
NAMES = st.sampled_from(
    ["q_proj", "k_proj", "up_proj", "0.mlp.down_proj", "layers.1.self_attn.o_proj", "mlp.up_proj",
     "model.layers.0.self_attn.v_proj", "lm_head", "embed_tokens"]
)  # fmt: skip
REGEXES = st.sampled_from(
    [r".*_proj", r".*\.1\..*proj", r"model\.layers\.0\.mlp\.\w+_proj", r"lm_head"]
)
LISTS = st.lists(NAMES, min_size=1, max_size=4, unique=True)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    target=st.one_of(LISTS, REGEXES, st.just("all-linear")),
    exclude=st.one_of(st.none(), LISTS, REGEXES),
    layers=st.one_of(st.none(), st.sampled_from([0, 1, [1], [0, 1]])),
    pattern=st.sampled_from([None, "layers", ["layers", "h"]]),
    ranks=st.dictionaries(NAMES, st.integers(1, 5), max_size=3),
)
def test_the_rules_of_matching(
    target: Any, exclude: Any, layers: Any, pattern: Any, ranks: dict[str, int]
) -> None:
    options = {"target_modules": target, "exclude_modules": exclude, "rank_pattern": ranks}
    if isinstance(target, list) and layers is not None:
        options |= {"layers_to_transform": layers, "layers_pattern": pattern}
    config, _ = parse_config({"peft_type": "LORA", "r": 4, "lora_alpha": 6, **options})
    if not Contract(config, LIVE, {}).pieces:
        with pytest.raises(ValueError, match="targeted|not found|excluded"):
            _theirs("llama", options)
        return
    raw, theirs = _theirs("llama", options)
    theirs = {key: shape for key, shape in theirs.items() if ".base_layer." not in key}
    contract = _ours(LIVE, raw, theirs)
    assert {key: shape for piece in contract.pieces for key, shape in piece.wants.items()} == theirs


@pytest.mark.parametrize("family", FAMILIES)
def test_a_live_model_survives_json(family: str) -> None:
    import json

    live = live_model(_fresh(family))
    assert LiveModel.from_json(json.loads(json.dumps(live.as_json()))) == live
    assert live.tensors
    assert live.modules
