"""Adapters whose initialiser changed the base weights: refused, with two ways out.

Uses peft's own initialisers, except LoftQ, which peft computes on CUDA only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tasks.weights.adapters.changes import changes
from tasks.weights.adapters.live import live_model
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

QV = ["q_proj", "v_proj"]
IDS = torch.arange(3, 51).reshape(3, 16)


def _corda(model: Any, config: LoraConfig) -> None:
    from peft.tuners.lora.corda import preprocess_corda

    def run() -> None:
        with torch.no_grad():
            for row in IDS:  # as many tokens as a layer is wide: its covariance has full rank
                model(row[None])

    preprocess_corda(model, config, run_model=run)


def _lora_ga(model: Any, config: LoraConfig) -> None:
    from peft.tuners.lora.loraga import preprocess_loraga

    preprocess_loraga(model, config, lambda: model(IDS, labels=IDS).loss.backward())


def _nothing(model: Any, config: LoraConfig) -> None:
    """Prepare nothing: the initialiser needs only the weights."""


def _settings(init: str) -> dict[str, Any]:
    from peft.tuners.lora.config import CordaConfig, LoraGAConfig

    own = {
        "corda": {"corda_config": CordaConfig(corda_method="kpm")},
        "lora_ga": {"lora_ga_config": LoraGAConfig()},
    }
    return {"r": 4, "lora_alpha": 8, "target_modules": QV, **own.get(init, {})}


PREPARE: dict[str, Callable[[Any, LoraConfig], None]] = {
    "pissa": _nothing,
    "pissa_niter_2": _nothing,
    "olora": _nothing,
    "corda": _corda,
    "lora_ga": _lora_ga,
}


def _initialised(model: Any, init: str) -> Any:
    """Return the wrapped model, whose base the initialiser changed."""
    config = LoraConfig(init_lora_weights=init, **_settings(init))
    fresh = copy.deepcopy(model)
    with quiet():
        PREPARE[init](fresh, config)
        wrapped = get_peft_model(fresh, config)
    name = "model.layers.0.self_attn.q_proj"
    left = wrapped.base_model.model.get_submodule(name).base_layer.weight
    assert not torch.equal(left, model.get_submodule(name).weight)
    return wrapped


def _move(wrapped: Any) -> None:
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


@pytest.mark.parametrize("init", PREPARE)
def test_refused_until_converted(init: str, tmp_path: Path) -> None:
    model = base_model("llama")
    wrapped = _initialised(model, init)
    initial = _save_as(wrapped, tmp_path / "initial", init=True)
    _move(wrapped)
    plain = save(copy.deepcopy(wrapped), tmp_path / "plain")
    refused = changes(opened(plain), live_model(model)).findings
    assert any("path_initial_model_for_weight_conversion" in finding for finding in refused)
    converted = save(
        wrapped, tmp_path / "converted", path_initial_model_for_weight_conversion=str(initial)
    )
    ours = our_merge(model, opened(converted))
    compare(ours, peft_merge(model, converted), model.state_dict())
    wrapped.set_adapter("default")
    trained = wrapped.merge_and_unload().state_dict()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor.float(), trained[name], rtol=2**-7, atol=2**-10)


@pytest.mark.parametrize("init", PREPARE)
def test_merged_into_the_base_that_training_left(init: str, tmp_path: Path) -> None:
    """The second way out, the only one for LoftQ: the changed base and a plain configuration."""
    wrapped = _initialised(base_model("llama"), init)
    left = copy.deepcopy(wrapped).unload()
    _move(wrapped)
    folder = _save_as(wrapped, tmp_path / "adapter", init=True)
    ours = our_merge(left, opened(folder))
    trained = {n: t.bfloat16() for n, t in wrapped.merge_and_unload().state_dict().items()}
    compare(ours, trained, left.state_dict())


@pytest.mark.slow
def test_eva_with_its_own_ranks(tmp_path: Path) -> None:
    """EVA does not change the base; its ranks are in the configuration's patterns."""
    from peft import initialize_lora_eva_weights
    from peft.tuners.lora.config import EvaConfig

    model = base_model("llama")
    config = LoraConfig(
        r=3,
        lora_alpha=8,
        target_modules=["q_proj", "o_proj", "down_proj"],
        init_lora_weights="eva",
        eva_config=EvaConfig(rho=2.0),
    )
    batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    with quiet():
        wrapped = get_peft_model(copy.deepcopy(model), config)
        initialize_lora_eva_weights(wrapped, [batch] * 4, show_progress_bar=False)
    _move(wrapped)
    folder = save(wrapped, tmp_path / "adapter")
    settings = wrapped.peft_config["default"]
    assert len(set(settings.rank_pattern.values())) > 1
    assert settings.alpha_pattern
    compare(our_merge(model, opened(folder)), peft_merge(model, folder), model.state_dict())


@pytest.mark.parametrize("init", ["gaussian", "orthogonal", "mica"])
def test_initialisers_that_leave_the_base_alone(init: str, tmp_path: Path) -> None:
    model = base_model("llama")
    config = LoraConfig(r=4, lora_alpha=6, target_modules=QV, init_lora_weights=init)
    folder = save(train(model, config), tmp_path / "adapter")
    compare(our_merge(model, opened(folder)), peft_merge(model, folder), model.state_dict())
