"""Schedules by transformers' names give transformers' numbers, one step ahead."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import SchedulerType, get_scheduler

from tasks.config.choices import Scheduler
from tasks.core.errors import ConfigError
from tasks.training.engine.schedule import SCHEDULERS, Shape, factor, warmup_steps

STEPS, WARMUP = 40, 5
SHAPE = Shape(min_ratio=0.1, decay_ratio=0.25, power=2.0, cycles=3)
KNOBS = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_with_restarts": {"num_cycles": 3},
    "polynomial": {"lr_end": 0.1 * 3e-3, "power": 2.0},
    "warmup_stable_decay": {"num_decay_steps": 10, "min_lr_ratio": 0.1},
}


def theirs(kind: str, warmup: int) -> list[float]:
    """Rates of their steps 1 to `STEPS` of a run of one more."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-3)
    schedule = get_scheduler(
        kind,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=STEPS + 1,
        scheduler_specific_kwargs=KNOBS.get(kind),
    )
    found = []
    for _ in range(STEPS):
        optimizer.step()
        schedule.step()
        found.append(optimizer.param_groups[0]["lr"] / 3e-3)
    return found


@pytest.mark.parametrize("warmup", [0, WARMUP])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_the_numbers_are_transformers_own(kind: str, warmup: int) -> None:
    ours = [
        factor(kind, step=step, total=STEPS, warmup=warmup, shape=SHAPE)
        for step in range(1, STEPS + 1)
    ]
    assert ours == pytest.approx(theirs(kind, warmup), abs=1e-12)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_no_step_is_wasted(kind: str) -> None:
    every = [factor(kind, step=s, total=STEPS, warmup=WARMUP) for s in range(1, STEPS + 1)]
    assert min(every) > 0
    assert max(every) == pytest.approx(1.0)


def test_the_configuration_knows_the_same_names() -> None:
    assert {member.name for member in Scheduler} == set(SCHEDULERS)
    with pytest.raises(ConfigError, match="train.scheduler=step") as caught:
        factor("step", step=1, total=4, warmup=2)
    assert "warmup_stable_decay" in caught.value.hint


def test_every_name_of_transformers_is_known_or_left_out_for_a_reason() -> None:
    theirs = {kind.value for kind in SchedulerType}
    assert theirs - set(SCHEDULERS) == {
        "reduce_lr_on_plateau",
        "greedy",
        "cosine_warmup_with_min_lr",
    }


def test_restarts_begin_at_the_peak() -> None:
    """Three falls over 30 steps: steps 10 and 20 are at the peak again."""
    shape = Shape(cycles=3)
    every = [factor("cosine_with_restarts", step=s, total=29, warmup=0, shape=shape)
             for s in range(1, 30)]  # fmt: skip
    assert every[9] == every[19] == 1.0
    assert every[8] == pytest.approx(0.5 * (1 + math.cos(0.9 * math.pi)), abs=1e-12)


def test_warmup_is_rounded_up_and_never_longer_than_the_run() -> None:
    assert [warmup_steps(40, r) for r in (0.0, 0.01, 0.1, 1.0)] == [0, 1, 4, 40]
