"""Optimizer steps of the online update: a gradient that is not finite moves no weight."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.commands import run_ranks

REFUSED = "step 2: the test's gradient is not finite; last good checkpoint: none yet"


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_ends_every_rank_before_a_weight_moves(
    tmp_path: Path,
) -> None:
    """With fp32 weights below ZeRO-3, DeepSpeed itself would take the step."""
    run_ranks("tests.rl.learner_program", str(tmp_path), log_path=tmp_path / "log")
    cases = itertools.product(("bfloat16", "float32"), range(4))
    expected = [f"{dtype} {stage}: False {REFUSED}" for dtype, stage in cases]
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text().splitlines() == expected
