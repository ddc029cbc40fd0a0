"""Optimizer steps of the online update: a gradient that is not finite moves no weight."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.rl import update
from tests.commands import run_ranks
from tests.settings import Batch, Loop, Optim, Settings

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


def test_the_policys_schedule_begins_after_the_critics_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of five iterations warm the critic up, with two steps each, without a clip."""
    rates: list[tuple[str, int, int]] = []
    clips: list[float | None] = []

    def set_lr(engine: str, optim: Any, *, step: int, steps: int) -> float:
        rates.append((engine, step, steps))
        return 0.0

    def step_critic(*arguments: Any) -> dict[str, float]:
        clips.append(arguments[-1])
        return {}

    monkeypatch.setattr(update, "set_lr", set_lr)
    monkeypatch.setattr(update, "minibatches", lambda *_: [None, None])
    monkeypatch.setattr(update.Updater, "_step_critic", step_critic)
    monkeypatch.setattr(update.Updater, "_step_policy", lambda *_: {})
    setup: Any = SimpleNamespace(
        job=SimpleNamespace(settings=Settings(batch=Batch(global_batch_size=8))),
        critic=SimpleNamespace(engine="critic", optim=Optim()),
        engine="policy",
        loop=Loop(rollout_batch_size=16, num_generations=1, critic_warmup=2),
        ranks=SimpleNamespace(rank=0),
    )
    inputs: Any = SimpleNamespace(experience=None)
    for iteration in range(1, 6):
        update.Updater(setup).update(iteration, inputs, lambda _: {}, of=5)
    assert [r for r in rates if r[0] == "policy"] == [("policy", n, 6) for n in range(1, 7)]
    assert [r for r in rates if r[0] == "critic"] == [("critic", n, 10) for n in range(1, 11)]
    assert clips == [None] * 4 + [0.2] * 6
