"""Gradients are summed in fp32, and weight decay applies to matrices alone."""

from __future__ import annotations

import json

import pytest

from tests.commands import run_ranks


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    folder = tmp_path_factory.mktemp("gradients")
    module = "tests.training.engine.gradients_program"
    run_ranks(module, str(folder), log_path=folder / "log")
    return [json.loads((folder / f"{stage}.json").read_text()) for stage in range(4)]


def test_small_gradients_are_not_lost_beside_a_large_one(stages: list[list[float]]) -> None:
    whole = (256 + 63 * 0.5) / 64
    assert [gradient for gradient, *_ in stages[2:]] == [whole, whole]
    assert stages[0][0] < whole  # DeepSpeed refuses fp32 sums of bf16 under ZeRO-0


def test_biases_do_not_decay(stages: list[list[float]]) -> None:
    for _, weight, bias in stages:
        assert (weight, bias) == (0.75, 1.0)
