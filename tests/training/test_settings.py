"""Settings and schedules."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import get_args

import pytest
import torch

from flows.cli.config import compose_config
from tasks.config.sections import Optim, Resume, Scheduler
from tasks.training.engine.zero_config import deepspeed_config
from tasks.training.job import Peft, Zero
from tasks.training.loop import schedule
from tests.settings import Settings


def test_every_setting_of_training_is_read_from_the_configuration() -> None:
    """Section `train` as composed, less the fields that do not change the result."""
    sections = compose_config([]).settings
    made = Settings.from_sections(
        **{name: sections[name] for name in ("train", "peft", "zero", "model", "seed")}
    )
    document = asdict(made)
    flat = {**document, **document["optim"], **document["batch"]}
    flat |= {**document["launch"], **document["evaluate"]}
    missing = {f.name for f in fields(Resume)}
    assert {name for name in sections["train"] if name not in flat} == missing
    assert flat["loss"] == sections["train"]["loss"]
    assert all(value == sections["train"].get(name, value) for name, value in flat.items())
    assert json.loads(json.dumps(document["peft"])) == sections["peft"]


@pytest.mark.parametrize(
    ("gpu", "optimizer", "fused"),
    [(True, "none", True), (False, "none", None), (True, "cpu", None)],
)
def test_the_fused_optimizer_runs_on_gpus_alone(
    gpu: bool, optimizer: str, fused: bool | None
) -> None:
    """torch's AdamW makes a kernel per tensor without it; CPUAdam does not know the argument."""
    config = deepspeed_config(Settings(zero=Zero(2, offload_optimizer=optimizer)), 2, gpu=gpu)
    parameters = config["optimizer"]["params"]
    assert parameters.get("fused") == fused
    assert parameters["torch_adam"] == (optimizer == "none")


def test_zero3_keeps_small_adapters_whole() -> None:
    """Each factor of a LoRA below the threshold saves a gather in every layer and pass."""
    for peft, chosen, threshold in (("none", None, 10**5), ("lora", None, 10**6), ("lora", 7, 7)):
        zero = Zero(3, persistence_threshold=chosen)
        config = deepspeed_config(Settings(peft=Peft(peft), zero=zero), 2)["zero_optimization"]
        assert config["stage3_param_persistence_threshold"] == threshold


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
    return [schedule(optim, steps)(step) for step in range(1, steps + 1)]


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
    for kind in get_args(Scheduler):
        for warmup in (0, WARMUP):
            expected = pytest.approx(theirs(kind, warmup), abs=1e-12)
            assert ours(kind, warmup, **options) == expected, (kind, warmup)
