"""Fixtures of several test files: a tiny Llama and a valid adapter of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from tasks.weights.adapters.live import LiveModel, live_model
from tests.weights.adapters.making import base_model, save, train


@pytest.fixture(scope="module")
def model() -> Any:
    return base_model("llama")


@pytest.fixture(scope="module")
def live(model: Any) -> LiveModel:
    return live_model(model)


@pytest.fixture(scope="module")
def good(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    return save(train(model, config), tmp_path_factory.mktemp("good") / "adapter")
