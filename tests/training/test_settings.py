"""Settings, DeepSpeed's configuration and the memory estimate, without torch."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from flows.cli.config import compose_config
from tasks.config.learning import Resume
from tasks.core.errors import ConfigError, StageProcessError, TrainingError
from tasks.train import _Events, _launch
from tasks.training.engine.failure import collective_timeout_s
from tasks.training.job import Peft, TrainJob, Zero
from tasks.training.memory.estimate import adapter_weights, estimate
from tasks.training.memory.mfu import Meter, step_flops
from tasks.training.memory.sizes import Sizes
from tasks.training.tokens.order import Counts
from tests.settings import Batch, Settings

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


def test_ranks_wait_for_each_other_at_least_as_long_as_for_rollouts(tmp_path: Path) -> None:
    job = TrainJob(Settings(), tmp_path, "b", tmp_path, tmp_path, tmp_path)
    assert collective_timeout_s(job) == 1800
    online = {"rollout": {"timeout_s": 3800.0}}
    assert collective_timeout_s(replace(job, settings=Settings(online=online))) > 3800


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
    full = [estimate(QWEN_7B, Settings(zero=Zero(s), batch=Batch(4, 16)), 4) for s in range(4)]
    assert [plan.optimizer for plan in full] == [12 * weights] + [3 * weights] * 3
    assert [plan.weights for plan in full] == [2 * weights] * 3 + [weights // 2]
    assert full[1].gradients > full[2].gradients


def test_model_flops_utilisation_of_one_long_sequence() -> None:
    """6 N + 12 L H Q T per token (PaLM), with every token supervised."""
    sizes = Sizes(
        hidden=4, intermediate=6, layers=2, vocab=10, heads=2, kv_heads=1, head_dim=2, tied=True
    )
    linear = 2 * (4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 6)
    counts = Counts(1, (512,), 512, 512**2)
    flops = step_flops(sizes, Settings(), counts)
    assert flops == 512 * (6 * (linear + 40) + 12 * 2 * 2 * 2 * 512)
    assert Meter(sizes, Settings(), peak=4 * flops).mfu(counts, 0.5) == 0.5


def test_nccls_watchdog_is_explained(tmp_path: Path) -> None:
    """NCCL raises nothing: it prints a line and aborts the rank."""
    line = "[rank1]: Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE)"

    def run(*_: Any, **__: Any) -> list[str]:
        raise StageProcessError("train", -6, [line, "terminate called"])

    job = TrainJob(Settings(), tmp_path, "b", tmp_path, tmp_path, tmp_path)
    events = _Events(None, logging.getLogger("test"), 64)
    with pytest.raises(TrainingError, match="1800 s") as caught:
        _launch(job, run, events, None, {})
    assert caught.value.details == (line,)
