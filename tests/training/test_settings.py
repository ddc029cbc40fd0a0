"""Settings, the memory estimate, schedules and the files of a base."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, fields
from pathlib import Path
from typing import get_args

import pytest
import torch

from flows.cli.config import compose_config
from tasks.config.choices import Scheduler
from tasks.config.learning import Optim, Resume
from tasks.core.errors import ConfigError
from tasks.training.job import Peft, TrainJob, Zero
from tasks.training.memory import Sizes, adapter_weights, estimate
from tasks.training.steps import factor
from tests.machines import published
from tests.settings import Batch, Launch, Settings

QWEN_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "vocab_size": 152064,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    settings = Settings(
        peft=Peft("qlora", target_modules=("q_proj",)), zero=Zero(1), batch=Batch(max_steps=3)
    )
    paths = {name: tmp_path / name for name in ("base", "data", "out", "checkpoints")}
    job = TrainJob(settings=settings, base_digest="d", **paths)
    job.write(tmp_path / "job.json")
    assert asdict(TrainJob.read(tmp_path / "job.json")) == asdict(job)


def test_settings_that_cannot_be_trained_with_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.lrr"):
        Settings.from_sections(train={"lrr": 1}, peft={}, zero={}, model={}, seed=0)
    assert Batch(4, 64).accumulation(2) == 8
    with pytest.raises(ConfigError, match="global_batch_size=10") as caught:
        Batch(4, 10).accumulation(2)
    assert caught.value.hint.startswith("train.global_batch_size=8")


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


def test_the_memory_plan_of_a_published_model() -> None:
    """Qwen2.5-7B: 7,615,616,512 parameters, of which 28 x 4,608 are attention biases."""
    sizes, weights = Sizes.of(QWEN_7B), 7_615_616_512 - 28 * 4_608
    assert sizes.weights() == weights
    # Rank 64 on all seven maps, the number peft prints for this model.
    assert adapter_weights(sizes, Settings(peft=Peft("lora", rank=64))) == 161_480_704
    assert sizes.kv_cache(1) == 57_344  # 2 x 28 layers x 4 heads x 128 x 2 bytes
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        with pytest.raises(KeyError):  # better unknown than one of eight experts
            Sizes.of({**QWEN_7B, key: 8})
    four = {"batch": Batch(4, 16), "launch": Launch(nproc=4), "dtype": "float32"}
    full = [estimate(QWEN_7B, Settings(zero=Zero(s, bucket_size=0), **four)) for s in range(4)]
    # Weights, gradients, their copy for the step, two moments: each divided from its stage on.
    needed = [plan.states + plan.gradients for plan in full]
    assert needed == [16 * weights, 7 * weights, 4 * weights, 4 * weights]
    assert [plan.weights for plan in full] == [4 * weights] * 3 + [weights + 4 * 10**9]


def test_weights_of_the_recipes_models_are_those_that_transformers_makes() -> None:
    """Biases and towers for images are not counted."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, config in published().items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        language = {n: p for n, p in model.named_parameters() if not re.search("vision|modal", n)}
        weights = sum(parameter.numel() for parameter in language.values())
        assert Sizes.of(config).weights() == pytest.approx(weights, rel=0.006), name


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
    for kind in get_args(Scheduler):
        for warmup in (0, WARMUP):
            expected = pytest.approx(theirs(kind, warmup), abs=1e-12)
            assert ours(kind, warmup, **options) == expected, (kind, warmup)
