"""Several adapters at once: combinations that cannot be added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from tasks.weights.adapters.changes import changes
from tasks.weights.adapters.live import LiveModel, live_model
from tasks.weights.adapters.read import read_adapter
from tests.weights.adapters.making import (
    opened,
    save,
    train,
)


@pytest.mark.parametrize("weight", [0.0, float("nan"), float("inf")])
def test_invalid_weights_are_refused(weight: float, good: Path, live: LiveModel) -> None:
    assert any(
        "number other than 0" in finding
        for finding in changes(opened(good, weight=weight), live).findings
    )


STORED = {"modules_to_save": ["lm_head"]}
TOKENS = {"trainable_token_indices": [3, 4]}
PAIRS = [
    (STORED, STORED, 1.0, "lm_head.weight: replaced by one adapter, changed by another"),
    (STORED, {"target_modules": ["lm_head"]}, 1.0, "changed by another"),
    ({"target_modules": ["lm_head"]}, STORED, 1.0, "changed by another"),
    (TOKENS, {"trainable_token_indices": [4, 5]}, 1.0, "two adapters replace row 4"),
    ({"use_dora": True}, {}, 1.0, "DoRA normalises the weights of the base"),
    ({}, STORED, 0.5, "is stored as a full tensor, so weight 0.5 cannot"),
    ({}, TOKENS, 0.5, "is stored as a full tensor, so weight 0.5 cannot"),
]


@pytest.mark.parametrize(("first", "second", "weight", "words"), PAIRS)
def test_adapters_that_exclude_each_other(
    first: dict[str, Any],
    second: dict[str, Any],
    weight: float,
    words: str,
    model: Any,
    tmp_path: Path,
) -> None:
    adapters = []
    for at, extra in enumerate((first, second)):
        config = LoraConfig(r=4, **{"target_modules": ["q_proj"], **extra})
        folder = save(train(model, config, seed=at), tmp_path / str(at))
        adapters.append((read_adapter(folder, f"a{at}"), weight if at else 1.0))
    assert any(words in text for text in changes(adapters, live_model(model)).findings)
