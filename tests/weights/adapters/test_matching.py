"""Modules that the settings of an adapter match are those that peft wraps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.weights.adapters.config import parse_config
from tasks.weights.adapters.live import LiveModel, live_model
from tasks.weights.adapters.pieces import Contract
from tasks.weights.families.meta import auto_class
from tests.weights.adapters.making import quiet
from tests.weights.families.making import FAMILIES


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


def _wanted(live: LiveModel, raw: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Return the shapes that our contract expects."""
    config, findings = parse_config({**raw, "peft_type": "LORA"})
    contract = Contract(config, live, {key: _Header(shape) for key, shape in saved.items()})
    assert not findings
    assert not contract.findings
    return {key: shape for piece in contract.pieces for key, shape in piece.wants.items()}


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
def test_the_rules_of_matching(
    target: Any, exclude: Any, layers: Any, pattern: Any, ranks: dict[str, int]
) -> None:
    options = {"target_modules": target, "exclude_modules": exclude, "rank_pattern": ranks}
    if isinstance(target, list) and layers is not None:
        options |= {"layers_to_transform": layers, "layers_pattern": pattern}
    live = live_model(_model())
    config, _ = parse_config({"peft_type": "LORA", "r": 4, "lora_alpha": 6, **options})
    if not Contract(config, live, {}).pieces:
        with pytest.raises(ValueError, match="targeted|not found|excluded"):  # peft's own
            _by_peft(options)
        return
    raw, saved = _by_peft(options)
    saved = {key: shape for key, shape in saved.items() if ".base_layer." not in key}
    assert _wanted(live, raw, saved) == saved
