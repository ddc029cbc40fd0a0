"""Learning-rate schedules: transformers' rates, one step ahead."""

from __future__ import annotations

import math

import pytest
import torch

from tasks.config.learning import Optim
from tasks.training.engine.schedule import SCHEDULERS, factor, warmup_steps

STEPS, WARMUP = 40, 5
KNOBS = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_with_restarts": {"num_cycles": 3},
    "polynomial": {"lr_end": 0.1 * 3e-3, "power": 2.0},
    "warmup_stable_decay": {"num_decay_steps": 10, "min_lr_ratio": 0.1},
}


def ours(kind: str, warmup: int, steps: int = STEPS, **options: float) -> list[float]:
    """Return our rates at steps 1 to `steps`, over the peak rate."""
    optim = Optim(lr=3e-3, scheduler=kind, warmup_ratio=warmup / steps, **options)
    return [factor(optim, step=step, total=steps) for step in range(1, steps + 1)]


def theirs(kind: str, warmup: int) -> list[float]:
    """Return transformers' rates at steps 1 to `STEPS` of a run of `STEPS` + 1."""
    from transformers import get_scheduler

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


def test_the_numbers_are_transformers_own() -> None:
    options = {"min_lr_ratio": 0.1, "decay_ratio": 0.25, "power": 2.0, "num_cycles": 3}
    for kind in SCHEDULERS:
        for warmup in (0, WARMUP):
            expected = pytest.approx(theirs(kind, warmup), abs=1e-12)
            assert ours(kind, warmup, **options) == expected, (kind, warmup)


def test_no_step_is_wasted() -> None:
    for kind in SCHEDULERS:
        every = ours(kind, WARMUP)
        assert min(every) > 0, kind
        assert max(every) == pytest.approx(1.0), kind


def test_a_decay_into_the_warmup_begins_after_it() -> None:
    every = ours("warmup_stable_decay", 30, decay_ratio=0.9)[28:]
    assert every[0] == pytest.approx(29 / 30)
    assert every[1] == 1.0 > every[2] > every[3]


def test_restarts_begin_at_the_peak() -> None:
    """With three falls over 30 steps, steps 10 and 20 are at the peak again."""
    every = ours("cosine_with_restarts", 0, steps=29, num_cycles=3)
    assert every[9] == every[19] == 1.0
    assert every[8] == pytest.approx(0.5 * (1 + math.cos(0.9 * math.pi)), abs=1e-12)


def test_warmup_is_rounded_up_and_never_longer_than_the_run() -> None:
    assert [warmup_steps(40, r) for r in (0.0, 0.01, 0.1, 1.0)] == [0, 1, 4, 40]
