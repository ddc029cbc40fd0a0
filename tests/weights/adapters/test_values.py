"""Values of an adapter: finite, and not all zero where zeros mean untrained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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
        (lambda t: t[Q0.format("B")].zero_(), "all zero"),
        (lambda t: t[Q0.format("B")].neg_().mul_(0), "all zero"),
        (lambda t: t[Q0.format("A")].zero_(), "all zero"),
        (lambda t: t[Q0.format("A")][0].fill_(float("nan")), "32 elements are NaN or infinite"),
        (lambda t: t[Q0.format("B")][1, 1].fill_(float("-inf")), "1 elements are NaN"),
    ],
)
def test_values(edit: Callable[[Tensors], Any], words: str, good: Path, tmp_path: Path) -> None:
    bad = read_adapter(altered(good, tmp_path / "bad", edit))
    assert any(words in finding for finding in value_findings(bad))
    with pytest.raises(ContractError, match=words):
        require_values([bad])


def test_good_values(good: Path) -> None:
    require_values([read_adapter(good)])


def test_an_expert_that_never_saw_a_token(good: Path, tmp_path: Path) -> None:
    """The B of one expert may be all zero if the B of another expert is not."""
    key = Q0.format("B").replace("q_proj", "experts.{}")

    def edit(tensors: Tensors) -> None:
        kept = tensors[Q0.format("B")]
        tensors.clear()
        tensors.update({key.format(0): torch.zeros_like(kept), key.format(1): kept})

    some = read_adapter(altered(good, tmp_path / "some", edit))
    assert list(value_findings(some)) == []

    def empty(tensors: Tensors) -> None:
        edit(tensors)
        tensors[key.format(1)].zero_()

    none = read_adapter(altered(good, tmp_path / "none", empty))
    assert [finding.partition(": ")[0] for finding in value_findings(none)] == [
        key.format(0), key.format(1),
    ]  # fmt: skip
