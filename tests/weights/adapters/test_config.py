from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.core.contract import Expected
from tasks.weights.adapters.config import AdapterConfig, parse_config
from tasks.weights.adapters.live import LiveModel
from tasks.weights.adapters.pieces import Contract

LIVE = LiveModel(
    tensors={
        name: Expected(name, shape)
        for name, shape in (
            ("model.embed.weight", (9, 4)),
            ("model.layers.0.q_proj.weight", (4, 4)),
            ("model.layers.0.q_proj.bias", (4,)),
            ("model.layers.0.experts.up", (2, 4, 4)),
            ("head.weight", (9, 4)),
        )
    },
    modules={
        "model": "other",
        "model.embed": "embedding",
        "model.layers.0.q_proj": "linear",
        "model.layers.0.experts": "other",
        "head": "linear",
    },
    tied={"head.weight": "model.embed.weight"},
    input_embedding="model.embed",
    output_embedding="head",
)

PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj"],
}


def test_configurations_that_peft_saves_are_accepted() -> None:
    import peft
    from peft import LoraConfig

    raw = LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj"], use_rslora=True).to_dict()
    raw["target_modules"] = sorted(raw["target_modules"])
    config, findings = parse_config(raw)
    assert findings == []
    assert config == AdapterConfig(
        rank=3, alpha=5, rslora=True, target_modules=("q_proj",), peft_version=peft.__version__
    )


def test_every_setting_of_peft_is_known() -> None:
    """A new peft with a new setting fails here, before a user's merge does."""
    import dataclasses

    from peft import LoraConfig

    from tasks.weights.adapters.config import _HARMLESS, _READ, _REFUSED

    groups = (_READ, _HARMLESS, set(_REFUSED))
    assert sum(map(len, groups)) == len(set().union(*groups))
    assert {field.name for field in dataclasses.fields(LoraConfig)} == set().union(*groups)


def test_every_initialiser_of_peft_is_known() -> None:
    """Every initialiser is known either to change the base or not to."""
    from typing import Literal, get_args, get_origin, get_type_hints

    from peft import LoraConfig

    types = get_args(get_type_hints(LoraConfig)["init_lora_weights"])
    names = [name for kind in types if get_origin(kind) is Literal for name in get_args(kind)]
    assert len(names) > 5
    plain = {name for name in names if not parse_config({**PLAIN, "init_lora_weights": name})[1]}
    assert plain == {"gaussian", "eva", "orthogonal", "mica"}
    for name in set(names) - plain:
        (finding,) = parse_config({**PLAIN, "init_lora_weights": name})[1]
        assert "does not fit the base" in finding


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not LORA"),
        ({"peft_type": "ADALORA"}, "merge_and_unload"),
        ({"peft_type": None}, "is not LORA"),
        ({"lora_alpha": 0}, "lora_alpha=0 is not a positive number"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan"),
        ({"r": 0}, "r=0 is not a positive number"),
        ({"r": 2.5}, "r=2.5"),
        ({"r": True}, "r=True"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: q_proj: 0"),
        ({"alpha_pattern": {"q_proj": 0}}, "alpha_pattern: q_proj: 0"),
        ({"alpha_pattern": {"(": 1}}, "is not a regular expression"),
        ({"rank_pattern": {"(?i)q": 1}}, "rank_pattern: .*is not a regular expression"),
        ({"modules_to_save": ["("]}, "modules_to_save: .*is not a regular expression"),
        ({"layers_pattern": "["}, "layers_pattern: .*is not a regular expression"),
        ({"r": 10**400}, "r=1000"),
        ({"target_modules": "("}, "target_modules: '\\('"),
        ({"target_modules": None}, "target_modules is null"),
        ({"target_modules": [1]}, "is not a list of names"),
        ({"bias": "some"}, "bias='some'"),
        ({"use_dora": "yes"}, "use_dora='yes' is not true or false"),
        ({"use_dora": True, "lora_bias": True}, "exclude each other"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "olora"}, "olora"),
        ({"init_lora_weights": "corda"}, "corda"),
        ({"init_lora_weights": "loftq"}, "4-bit values.* merge it into the base as training left"),
        ({"init_lora_weights": "lora_ga"}, "lora_ga"),
        ({"init_lora_weights": "sorcery"}, "init_lora_weights='sorcery' is unknown"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication=.*replicate the base first"),
        ({"alora_invocation_tokens": [1]}, "some tokens only.* serve it unmerged"),
        ({"use_qalora": True}, "use_qalora=True"),
        ({"use_bdlora": {"x": 1}}, "use_bdlora"),
        ({"arrow_config": {"top_k": 1}}, "router"),
        ({"kasa_config": {"beta": 1e-4}}, "kasa_config=.*merge_and_unload"),
        ({"megatron_config": {"x": 1}}, "Megatron"),
        ({"use_new_thing": True}, "use_new_thing=True is not a LoRA setting of peft 0.21"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform"),
        ({"trainable_token_indices": [1, 1]}, "duplicate token id"),
        ({"trainable_token_indices": {"embed": [-1]}}, "trainable_token_indices"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refused_by_name(change: dict[str, Any], words: str) -> None:
    import re

    _, findings = parse_config({**PLAIN, **change})
    assert any(re.search(words, finding) for finding in findings), findings


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_plain_initialisers(init: Any) -> None:
    assert parse_config({**PLAIN, "init_lora_weights": init})[1] == []


def test_scales() -> None:
    config, _ = parse_config(
        {**PLAIN, "rank_pattern": {"up": 16, ".*proj": 2}, "alpha_pattern": {"layers.0.*": 3}}
    )
    assert config.scale_of("layers.1.down") == 2
    assert config.scale_of("layers.1.up") == 0.5
    assert config.scale_of("layers.0.x_proj") == 1.5
    root, _ = parse_config({**PLAIN, "use_rslora": True})
    assert root.scale_of("any") == 4


TEXT = st.text(max_size=4) | st.sampled_from(
    [
        "model",
        "q_proj",
        "experts.up",
        "head",
        "model.embed",
        "lora_only",
        "all-linear",
        "(",
        "*",
        "[",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300)
@given(
    key=st.sampled_from(
        sorted(
            {
                *PLAIN,
                "rank_pattern",
                "alpha_pattern",
                "modules_to_save",
                "target_parameters",
                "exclude_modules",
                "layers_pattern",
                "layers_to_transform",
                "bias",
                "trainable_token_indices",
                "lora_bias",
                "use_dora",
                "use_rslora",
                "task_type",
            }
        )
    ),
    value=JSON,
)
def test_any_json_gives_findings_or_a_contract(key: str, value: Any) -> None:  # fmt: skip
    config, findings = parse_config({**PLAIN, key: value})
    contract = Contract(config, LIVE, {})
    assert all(isinstance(finding, str) for finding in (*findings, *contract.findings))
