"""Names of live parameters become the keys that peft saves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.errors import ContractError
from tasks.weights.files.names import LoraKey, live_to_peft, parse_peft, rename_all, unwrap
from tests.tiny import tiny

LIVE = "base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight"
PEFT = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
PARTS = st.lists(
    st.sampled_from(["model", "layers", "0", "q_proj", "mlp", "lora_A"]), min_size=1, max_size=5
)


@given(parts=PARTS, half=st.sampled_from(["A", "B"]))
def test_names_survive_the_round_trip(parts: list[str], half: str) -> None:
    key = LoraKey(".".join(parts), half)
    live = key.peft.removesuffix("weight") + "default.weight"
    assert parse_peft(live_to_peft(live)) == key


def test_wrappers_are_dropped() -> None:
    wrapped = LIVE.replace("mlp.", "mlp._checkpoint_wrapped_module.")
    for name in (f"module.{LIVE}", f"module._orig_mod.{LIVE}", wrapped):
        assert unwrap(name) == LIVE
        assert live_to_peft(name) == PEFT
    head = "module.lm_head.weight"  # full training keeps the model's own names
    assert rename_all([head], adapter=False) == {head: "lm_head.weight"}


def test_other_names_are_refused() -> None:
    for name in (
        LIVE.replace("default", "other"),
        LIVE.replace("lora_A.default.weight", "weight"),
        LIVE.removeprefix("base_model.model."),
        LIVE.replace("lora_A.default.weight", "lora_A.default.bias.more"),
        LIVE.replace("weight", "scale"),
    ):
        with pytest.raises(ContractError, match="default"):
            live_to_peft(name)
    for key in ("model.up_proj.lora_A.weight", "base_model.model.x.weight", PEFT + "s", ""):
        assert parse_peft(key) is None
    with pytest.raises(ContractError, match="up_proj"):
        rename_all([LIVE, f"module.{LIVE}"], adapter=True)  # two names for one key
    with pytest.raises(ContractError) as caught:
        rename_all(["x.weight", LIVE, "y.weight"], adapter=True)
    assert len(caught.value.details) == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"], "lora_bias": True},
        {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2], "bias": "all"},
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.up_proj.weight"]},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_trainable_parameters_get_the_keys_that_peft_saves(settings: dict[str, object]) -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import Qwen2ForCausalLM

    config = tiny("Qwen2", num_hidden_layers=1, tie_word_embeddings=False)
    model = get_peft_model(Qwen2ForCausalLM(config), LoraConfig(r=2, **settings))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    saved = get_peft_model_state_dict(model, save_embedding_layers=False)
    keys = rename_all(trained, adapter=True)
    assert set(keys.values()) == set(saved)
    assert all(saved[key].shape == trained[name].shape for name, key in keys.items())
