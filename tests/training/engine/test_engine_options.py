"""Engine options that do not change the result: activation checkpointing, 8-bit moments."""

from __future__ import annotations

import pytest

from tests.training.model.adapter_jobs import Adapted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["checkpointed_zero3", "reentrant_zero3"])
def test_gradient_checkpointing_changes_no_number(adapted: Adapted, name: str) -> None:
    """`CheckpointError: recomputed metadata ... torch.Size([0])` on older stacks."""
    assert adapted[name].losses == pytest.approx(adapted["lora_zero2"].losses, abs=2e-3)
    assert all(t.any() for n, t in adapted[name].stitched().items() if "lora_B" in n)


def test_8bit_adamw_learns(adapted: Adapted) -> None:
    losses = adapted["8bit_zero3"].losses
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.slow
def test_8bit_adamw_has_the_same_losses_under_both_stages(adapted: Adapted) -> None:
    assert adapted["8bit"].losses == pytest.approx(adapted["8bit_zero3"].losses, rel=0.02)
