"""Settings of an adapter: those of peft are known, and match the modules that peft wraps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.weights.lora_config import parse_config
from tasks.weights.model import Model, live_model
from tasks.weights.model_class import auto_class
from tasks.weights.pairing import Pairing
from tests.weights.adapters.making import quiet
from tests.weights.families.making import FAMILIES

PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj"],
}


def test_every_setting_of_peft_is_known() -> None:
    """A new peft with a new setting fails here, before a user's merge does."""
    import dataclasses

    from peft import LoraConfig

    from tasks.weights.lora_config import _HARMLESS, _READ, _REFUSED

    groups = (_READ, _HARMLESS, _REFUSED)
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
    (unknown,) = parse_config({**PLAIN, "init_lora_weights": "new"})[1]
    for name in set(names) - plain:
        (finding,) = parse_config({**PLAIN, "init_lora_weights": name})[1]
        assert name in finding
        assert finding != unknown.replace("new", name)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "IA3"),
    ({"lora_alpha": float("nan")}, "lora_alpha=nan"),
    ({"r": 0}, "r=0"),
    ({"r": 10**400}, "r=1000"),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern"),
    ({"alpha_pattern": {"(": 1}}, "alpha_pattern"),
    ({"rank_pattern": {"(?i)q": 1}}, "rank_pattern"),
    ({"target_modules": "("}, "target_modules"),
    ({"target_modules": None}, "target_modules"),
    ({"bias": "some"}, "bias='some'"),
    ({"use_dora": "yes"}, "use_dora='yes'"),
    ({"lora_bias": True}, "lora_bias"),
    ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
    ({"init_lora_weights": "sorcery"}, "sorcery"),
    ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    ({"use_new_thing": True}, "use_new_thing"),
    ({"trainable_token_indices": [1, 1]}, "trainable_token_indices"),
]


def test_settings_that_cannot_be_merged_are_refused_by_name() -> None:
    missed = []
    for change, thing in REFUSED:
        _, findings = parse_config({**PLAIN, **change})
        if not any(thing in finding for finding in findings):
            missed.append((change, findings))
    assert missed == []


def _model() -> Any:
    with torch.device("meta"), quiet():
        config = FAMILIES["llama"].config()
        return auto_class(config).from_config(config, dtype=torch.bfloat16)


def _by_peft(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configuration and the shapes that peft would save."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    with quiet(), torch.device("meta"):
        config = LoraConfig(r=4, lora_alpha=6, init_lora_weights=False, **options)
        state = get_peft_model_state_dict(get_peft_model(_model(), config))
    raw = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
    return raw, {name: tuple(tensor.shape) for name, tensor in state.items()}


class _Header:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.dtype = shape, "BF16"


def _pairing(live: Model, raw: dict[str, Any], saved: dict[str, Any]) -> Pairing:
    config, findings = parse_config({**raw, "peft_type": "LORA"})
    assert not findings
    return Pairing(config, live, {key: _Header(shape) for key, shape in saved.items()})


NAMES = st.sampled_from(
    ["q_proj", "k_proj", "up_proj", "0.mlp.down_proj", "layers.1.self_attn.o_proj", "mlp.up_proj",
     "model.layers.0.self_attn.v_proj", "lm_head", "embed_tokens"]
)  # fmt: skip
REGEXES = st.sampled_from(
    [r".*_proj", r".*\.1\..*proj", r"model\.layers\.0\.mlp\.\w+_proj", r"lm_head"]
)
LISTS = st.lists(NAMES, min_size=1, max_size=4, unique=True)


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(
    target=st.one_of(LISTS, REGEXES, st.just("all-linear")),
    exclude=st.one_of(st.none(), LISTS, REGEXES),
    layers=st.one_of(st.none(), st.sampled_from([0, 1, [1], [0, 1]])),
    pattern=st.sampled_from([None, "layers", ["layers", "h"]]),
    ranks=st.dictionaries(NAMES, st.integers(1, 5), max_size=3),
)
def test_the_rules_of_matching(target, exclude, layers, pattern, ranks) -> None:
    options = {"target_modules": target, "exclude_modules": exclude, "rank_pattern": ranks}
    if isinstance(target, list) and layers is not None:
        options |= {"layers_to_transform": layers, "layers_pattern": pattern}
    live = live_model(_model())
    if not _pairing(live, {"r": 4, "lora_alpha": 6, **options}, {}).pieces:
        with pytest.raises(ValueError, match="targeted|not found|excluded"):  # peft's own
            _by_peft(options)
        return
    raw, saved = _by_peft(options)
    saved = {key: shape for key, shape in saved.items() if ".base_layer." not in key}
    pairing = _pairing(live, raw, saved)
    assert not pairing.findings
    assert pairing.wanted == saved
