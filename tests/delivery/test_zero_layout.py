"""A checkpoint in DeepSpeed's layout, written without it; `test_zero.py` uses DeepSpeed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.delivery.conftest import Done
from tests.weights.deepspeed.test_partitions_property import write
from tests.weights.making import state_of

Run = Callable[..., Done]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_full_fine_tuning(
    request: pytest.FixtureRequest, stage: int, base: Path, tmp_path: Path
) -> None:
    run = request.getfixturevalue("deliver" if stage == 3 else "here")
    generator = torch.Generator().manual_seed(2)
    trained = {
        name: tensor.float() + torch.randn(tensor.shape, generator=generator) * 0.05
        for name, tensor in state_of(base).items()
    }
    source = tmp_path / "zero"
    write(source, [trained], stage, 3, 2)
    shutil.copy(base / "config.json", source)
    done = run(f"source={source}", f"base={base}", f"out={tmp_path / 'out'}")
    assert done.code == 0, done.output
    assert "a DeepSpeed checkpoint" in done.output
    assert done.stages == ["audit", "gather", "convert"]
    actual = state_of(tmp_path / "out")
    assert actual.keys() == trained.keys()
    assert all(torch.equal(tensor, trained[name].bfloat16()) for name, tensor in actual.items())
