from __future__ import annotations

from typing import Any

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


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "IA3"),
    ({"peft_type": None}, "peft_type"),
    ({"lora_alpha": 0}, "lora_alpha=0"),
    ({"lora_alpha": float("nan")}, "lora_alpha=nan"),
    ({"r": 0}, "r=0"),
    ({"r": 2.5}, "r=2.5"),
    ({"r": True}, "r=True"),
    ({"r": 10**400}, "r=1000"),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: q_proj"),
    ({"alpha_pattern": {"q_proj": 0}}, "alpha_pattern: q_proj"),
    ({"alpha_pattern": {"(": 1}}, "alpha_pattern"),
    ({"rank_pattern": {"(?i)q": 1}}, "rank_pattern"),
    ({"modules_to_save": ["("]}, "modules_to_save"),
    ({"layers_pattern": "["}, "layers_pattern"),
    ({"target_modules": "("}, "target_modules"),
    ({"target_modules": None}, "target_modules"),
    ({"target_modules": [1]}, "target_modules"),
    ({"bias": "some"}, "bias='some'"),
    ({"use_dora": "yes"}, "use_dora='yes'"),
    ({"use_dora": True, "lora_bias": True}, "lora_bias"),
    ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
    ({"init_lora_weights": "loftq"}, "4-bit"),
    ({"init_lora_weights": "sorcery"}, "sorcery"),
    ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    ({"use_qalora": True}, "use_qalora"),
    ({"use_bdlora": {"x": 1}}, "use_bdlora"),
    ({"arrow_config": {"top_k": 1}}, "arrow_config"),
    ({"kasa_config": {"beta": 1e-4}}, "kasa_config"),
    ({"megatron_config": {"x": 1}}, "megatron_config"),
    ({"use_new_thing": True}, "use_new_thing"),
    ({"layers_to_transform": ["0"]}, "layers_to_transform"),
    ({"trainable_token_indices": [1, 1]}, "trainable_token_indices"),
    ({"trainable_token_indices": {"embed": [-1]}}, "trainable_token_indices"),
]


def test_settings_that_cannot_be_merged_are_refused_by_name() -> None:
    missed = []
    for change, thing in REFUSED:
        _, findings = parse_config({**PLAIN, **change})
        if not any(thing in finding for finding in findings):
            missed.append((change, findings))
    assert missed == []
    for init in (True, False, None, "gaussian", "eva", "orthogonal", "mica"):
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


WORDS = ["model", "q_proj", "experts.up", "head", "model.embed", "lora_only", "all-linear"]
TEXT = st.text(max_size=4) | st.sampled_from([*WORDS, "(", "*", "["])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
KEYS = [
    *PLAIN, "rank_pattern", "alpha_pattern", "modules_to_save", "target_parameters",
    "exclude_modules", "layers_pattern", "layers_to_transform", "bias", "trainable_token_indices",
    "lora_bias", "use_dora", "use_rslora", "task_type",
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(key=st.sampled_from(KEYS), value=JSON)
def test_any_json_gives_findings_or_a_contract(key: str, value: Any) -> None:
    config, findings = parse_config({**PLAIN, key: value})
    contract = Contract(config, LIVE, {})
    assert all(isinstance(finding, str) for finding in (*findings, *contract.findings))
