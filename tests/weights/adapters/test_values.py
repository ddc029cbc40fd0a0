"""Values of an adapter: finite, and not all zero where zeros mean untrained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import ContractError
from tasks.weights.adapters.read import read_adapter
from tasks.weights.adapters.values import require_values, value_findings
from tests.weights.adapters.making import (
    Tensors,
    altered,
)

Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: _zeroed(t, "lora_B"), "LoRA pairs have a factor that is all zero"),
        (lambda t: _zeroed(t, "lora_A"), "LoRA pairs have a factor that is all zero"),
        (lambda t: t[Q0.format("A")][0].fill_(float("nan")), "32 elements are NaN or infinite"),
        (lambda t: t[Q0.format("B")][1, 1].fill_(float("-inf")), "1 elements are NaN"),
    ],
)
def test_values(edit: Callable[[Tensors], Any], words: str, good: Path, tmp_path: Path) -> None:
    bad = read_adapter(altered(good, tmp_path / "bad", edit))
    assert any(words in finding for finding in value_findings(bad))
    with pytest.raises(ContractError, match=words):
        require_values([bad])


def _zeroed(tensors: Tensors, half: str) -> None:
    for key in tensors:
        if half in key:
            tensors[key].neg_().mul_(0)  # -0.0, too


@pytest.mark.parametrize("half", ["A", "B"])
def test_good_values_and_a_module_that_saw_no_data(half: str, good: Path, tmp_path: Path) -> None:
    require_values([read_adapter(good)])
    some = altered(good, tmp_path / "some", lambda tensors: tensors[Q0.format(half)].zero_())
    require_values([read_adapter(some)])
