"""Iterations, the KL that limits them, and the optimizer steps of policy and critic."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.core.errors import TrainingError
from tasks.rl import update
from tasks.rl.algorithms import ALGORITHMS
from tasks.rl.experience import ExperienceScorer, pack_experience
from tasks.rl.loop import iterations
from tasks.training.loop import MAX_SKIPPED
from tests.rl.making import responses
from tests.settings import Batch, Loop, Optim, Settings

CRITIC = SimpleNamespace(engine="critic", optim=Optim())


def setup(folder: Path, loop: Loop, **settings: Any) -> Any:
    return SimpleNamespace(
        algorithm=ALGORITHMS["grpo"], critic=CRITIC, engine="policy", loop=loop,
        job=SimpleNamespace(settings=Settings(**settings), checkpoints=folder),
        ranks=SimpleNamespace(rank=0, first=True),
    )  # fmt: skip


@pytest.mark.parametrize("refill", [0, 2, 9])
def test_an_epoch_takes_every_prompt_once(refill: int) -> None:
    assert iterations(Loop(refill=refill), Batch(epochs=1), 1000) == 32
    assert iterations(Loop(refill=refill, iterations=7), Batch(epochs=1), 1000) == 7


def test_the_policys_schedule_begins_after_the_critics_warm_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two of five iterations warm the critic up, with two steps each, without a clip."""
    rates: dict[str, list[tuple[int, int]]] = {"policy": [], "critic": []}
    clips: list[float | None] = []

    def set_lr(engine: str, optim: Any, *, step: int, steps: int) -> float:
        rates[engine].append((step, steps))
        return 0.0

    def step_critic(*arguments: Any) -> dict[str, float]:
        clips.append(arguments[-1])
        return {}

    monkeypatch.setattr(update, "set_lr", set_lr)
    monkeypatch.setattr(update, "minibatches", lambda *_: [([], None)] * 2)
    monkeypatch.setattr(update.Updater, "_step_critic", step_critic)
    monkeypatch.setattr(update.Updater, "_step_policy", lambda *_: {})
    loop = Loop(rollout_batch_size=16, num_generations=1, critic_warmup=2)
    of: Any = setup(tmp_path, loop, batch=Batch(global_batch_size=8))
    updater, experience = update.Updater(of, ExperienceScorer(of)), pack_experience(responses())
    for iteration in range(1, 6):
        updater.update(iteration, experience, of=5)
    assert rates["policy"] == [(step, 6) for step in range(1, 7)]
    assert rates["critic"] == [(step, 10) for step in range(1, 11)]
    assert clips == [None] * 4 + [0.2] * 6


def test_fp16_steps_that_overflow_are_counted_and_end_the_run(tmp_path: Path) -> None:
    of = setup(tmp_path, Loop(), dtype="float16")
    updater = update.Updater(of, ExperienceScorer(of))

    def take(*, applied: bool, whose: str = "policy") -> dict[str, float]:
        engine = SimpleNamespace(
            step=lambda: None,
            was_step_applied=lambda: applied,
            get_global_grad_norm=lambda: 2.0 if applied else math.inf,
        )
        return updater._take(whose, engine, 1)

    assert take(applied=False) == {"skipped": 1.0}
    assert take(applied=True) == {"skipped": 0.0, "grad_norm": 2.0}
    for _ in range(MAX_SKIPPED - 1):
        take(applied=False)
    take(applied=False, whose="critic")
    with pytest.raises(TrainingError, match=f"fp16 .* {MAX_SKIPPED} "):
        take(applied=False)


def test_the_limit_of_the_kl_goes_by_k1(tmp_path: Path) -> None:
    """One token of 14 nats is a KL of 0.2 by k3, even clamped; the run is not far away."""
    experience = pack_experience(responses())
    old = experience.sampled.clone()
    reference = old - 0.01
    reference[3] = old[3] + 14.0
    experience = replace(experience, old=old, reference=reference)

    def estimate(limit: float) -> dict[str, float]:
        scorer = ExperienceScorer(setup(tmp_path, Loop(kl_limit=limit)))
        return scorer.estimate(experience, 0.0, 1)[1]

    record = estimate(0.02)
    assert record["kl"] > 0.1
    assert record["kl_k1"] == pytest.approx(float((old - reference).mean()))
    reference[3] = old[3] - 14.0
    with pytest.raises(TrainingError, match="kl_limit"):
        estimate(0.02)
