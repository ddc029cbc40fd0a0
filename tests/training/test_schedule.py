"""Learning-rate schedules: transformers' rates, one step ahead."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import SchedulerType, get_scheduler

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
    """Return transformers' rates at steps 1 to `STEPS` of a run of `STEPS` + 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-3)
    schedule = get_scheduler(
        kind,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=STEPS + 1,
        scheduler_specific_kwargs=KNOBS.get(kind),
    )
    rates = []
    for _ in range(STEPS):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"] / 3e-3)
    return rates


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


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
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


@pytest.mark.parametrize("kind", ["polynomial", "cosine_with_min_lr"])
def test_a_last_rate_at_the_peak_is_constant(kind: str) -> None:
    shape = Shape(min_ratio=1.0)
    every = [factor(kind, step=s, total=STEPS, warmup=1, shape=shape) for s in range(1, STEPS + 1)]
    assert every == pytest.approx([1.0] * STEPS, abs=1e-15)


def test_a_decay_into_the_warmup_begins_after_it() -> None:
    every = [factor("warmup_stable_decay", step=s, total=STEPS, warmup=30,
                    shape=Shape(decay_ratio=0.9)) for s in range(29, 33)]  # fmt: skip
    assert every[0] == pytest.approx(29 / 30)
    assert every[1] == 1.0 > every[2] > every[3]


def test_restarts_begin_at_the_peak() -> None:
    """With three falls over 30 steps, steps 10 and 20 are at the peak again."""
    shape = Shape(cycles=3)
    every = [factor("cosine_with_restarts", step=s, total=29, warmup=0, shape=shape)
             for s in range(1, 30)]  # fmt: skip
    assert every[9] == every[19] == 1.0
    assert every[8] == pytest.approx(0.5 * (1 + math.cos(0.9 * math.pi)), abs=1e-12)


def test_warmup_is_rounded_up_and_never_longer_than_the_run() -> None:
    assert [warmup_steps(40, r) for r in (0.0, 0.01, 0.1, 1.0)] == [0, 1, 4, 40]
