"""Engine options that do not change the result: activation checkpointing, 8-bit moments."""

from __future__ import annotations

import pytest

from tests.training.jobs import Left


@pytest.mark.parametrize("name", ["checkpointed_zero3", "reentrant_zero3"])
def test_gradient_checkpointing_changes_no_number(adapted: dict[str, Left], name: str) -> None:
    """`CheckpointError: recomputed metadata ... torch.Size([0])` on older stacks."""
    assert adapted[name].losses == pytest.approx(adapted["lora_zero2"].losses, abs=2e-3)
    assert all(t.any() for n, t in adapted[name].stitched().items() if "lora_B" in n)


def test_8bit_adamw_has_the_same_losses_under_both_stages(adapted: dict[str, Left]) -> None:
    two, three = adapted["8bit"].losses, adapted["8bit_zero3"].losses
    assert two == pytest.approx(three, rel=0.02)
    assert two[-1] < two[0] - 0.5
