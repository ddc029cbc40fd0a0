"""Adapters whose initialiser changed the base weights: refused, with two ways out.

Uses peft's own initialisers, except LoftQ, which peft computes on CUDA only.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.core.errors import ContractError
from tests.weights.adapters.making import quiet, save
from tests.weights.families.making import FAMILIES, load, make_model, merge, merged_by_peft
from tests.weights.making import state_of
from tests.weights.rounding import rounded_alike

IDS = torch.arange(3, 51).reshape(3, 16)
INITIALISERS = [
    "pissa",
    "lora_ga",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("pissa_niter_2", "olora", "corda")),
]


def _initialised(base: Path, init: str) -> Any:
    """Return the wrapped model, whose base the initialiser changed."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora.config import CordaConfig, LoraGAConfig
    from peft.tuners.lora.corda import preprocess_corda
    from peft.tuners.lora.loraga import preprocess_loraga

    own = {
        "corda": {"corda_config": CordaConfig(corda_method="kpm")},
        "lora_ga": {"lora_ga_config": LoraGAConfig()},
    }
    model = load(base, torch.float32)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    config = LoraConfig(init_lora_weights=init, **settings, **own.get(init, {}))
    name = "model.layers.0.self_attn.q_proj"
    before = model.get_submodule(name).weight.detach().clone()

    @torch.no_grad()
    def run() -> None:
        for row in IDS:  # as many tokens as a layer is wide: its covariance has full rank
            model(row[None])

    with quiet():
        if init == "corda":
            preprocess_corda(model, config, run_model=run)
        elif init == "lora_ga":
            preprocess_loraga(model, config, lambda: model(IDS, labels=IDS).loss.backward())
        wrapped = get_peft_model(model, config)
    assert not torch.equal(wrapped.base_model.model.get_submodule(name).base_layer.weight, before)
    return wrapped


def _train(wrapped: Any) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for name, tensor in wrapped.named_parameters():
            if "lora_" in name:
                tensor.add_(torch.randn_like(tensor) * 0.05)


def _save_as(wrapped: Any, folder: Path, init: Any) -> Path:
    config = wrapped.peft_config["default"]
    before, config.init_lora_weights = config.init_lora_weights, init
    save(wrapped, folder)
    config.init_lora_weights = before
    return folder


@pytest.mark.parametrize("init", INITIALISERS)
def test_refused_until_converted_or_merged_into_the_changed_base(init: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    make_model(FAMILIES["llama"].config()).save_pretrained(base)
    wrapped = _initialised(base, init)
    copy.deepcopy(wrapped).unload().save_pretrained(tmp_path / "changed")
    initial = _save_as(wrapped, tmp_path / "initial", init=True)
    _train(wrapped)
    with pytest.raises(ContractError, match="path_initial_model_for_weight_conversion"):
        merge(base, save(copy.deepcopy(wrapped), tmp_path / "plain"), tmp_path / "refused")

    other = _save_as(wrapped, tmp_path / "other", init=True)
    converted = save(
        wrapped, tmp_path / "converted", path_initial_model_for_weight_conversion=str(initial)
    )
    merge(base, converted, tmp_path / "out")
    ours, theirs = state_of(tmp_path / "out"), merged_by_peft(base, converted).state_dict()
    assert not [name for name in ours if not rounded_alike(ours[name], theirs[name])]

    wrapped.set_adapter("default")
    trained = wrapped.merge_and_unload().state_dict()
    merge(tmp_path / "changed", other, tmp_path / "second", dtype="F32")
    second = state_of(tmp_path / "second")
    for name in ours:
        torch.testing.assert_close(ours[name].float(), trained[name], rtol=2**-7, atol=2**-9)
        torch.testing.assert_close(second[name], trained[name], rtol=1e-5, atol=1e-6)
