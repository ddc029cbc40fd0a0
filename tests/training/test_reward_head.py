"""Reward models under DeepSpeed: the head has one label, is trained in full, and is saved."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.drift.reward_scores import ScorePrint, score_drift
from tasks.training.job import Peft, Zero
from tasks.training.tokens.examples import Example, Tokens
from tests.settings import Batch, Optim, Settings
from tests.training.conftest import save_base
from tests.training.datasets import write_examples
from tests.training.jobs import Left, Wanted, load_trained, run_jobs

ZERO3 = Zero(3, persistence_threshold=0)
SETTINGS = Settings(
    objective="reward",
    optim=Optim(lr=2e-3, warmup_ratio=0.1),
    batch=Batch(micro_batch_size=4, global_batch_size=16, max_steps=6, max_len=64),
    save_steps=0,
    probes=9,
)
SCENARIOS = {
    "full_zero1": replace(SETTINGS, zero=Zero(1)),
    "full_zero3": replace(SETTINGS, zero=ZERO3),
    "lora_zero3": replace(
        SETTINGS, peft=Peft("lora", rank=4, alpha=8), zero=ZERO3, gradient_checkpointing=True
    ),
    "qlora_zero2": replace(SETTINGS, peft=Peft("qlora", rank=4, alpha=8), zero=Zero(2)),
}
OTHER_STAGES = {
    f"{kind}_zero{stage}": replace(SETTINGS, peft=peft, zero=Zero(stage))
    for kind, peft, stages in (
        ("full", Peft(), (0, 2)),
        ("lora", Peft("lora", rank=4, alpha=8), (0, 1, 2)),
        ("qlora", Peft("qlora", rank=4, alpha=8), (0, 1)),
    )
    for stage in stages
}
LIVE_HEAD = "base_model.model.score.modules_to_save.default.weight"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    """Save a minimal Qwen2 of width 5120, that of the 14B model, with an untied head."""
    return save_base(
        tmp_path_factory.mktemp("wide"),
        tokenizer,
        hidden_size=5120,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=32,
        num_key_value_heads=1,
        intermediate_size=64,
        tie_word_embeddings=False,
    )


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    """Write pairs whose chosen answer is in capitals."""
    folder = tmp_path_factory.mktemp("pairs")
    draw = random.Random(0)

    def tokens(text: str) -> Tokens:
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        return Tokens(ids, [False] * 4 + [True] * (len(ids) - 4))

    def example(i: int) -> Example:
        word = "".join(draw.choice("abcdef") for _ in range(draw.randint(5, 12)))
        return Example(f"p{i}", (tokens(f"say: {word.upper()}"), tokens(f"say: {word}")))

    made = [example(i) for i in range(96)]
    write_examples(folder, made, roles=("chosen", "rejected"))
    return folder


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory, base: Path, wide: Path, pairs: Path) -> Any:
    wanted = {
        name: Wanted(one, wide if name == "lora_zero3" else base, pairs)
        for name, one in SCENARIOS.items()
    }
    return run_jobs(tmp_path_factory.mktemp("rewards"), wanted)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory, base: Path, pairs: Path) -> dict[str, Left]:
    wanted = {name: Wanted(one, base, pairs) for name, one in OTHER_STAGES.items()}
    return run_jobs(tmp_path_factory.mktemp("stages"), wanted)


@pytest.fixture(
    params=[*SCENARIOS, *(pytest.param(n, marks=pytest.mark.slow) for n in OTHER_STAGES)]
)
def run(request: pytest.FixtureRequest) -> Left:
    jobs: dict[str, Left] = request.getfixturevalue(
        "left" if request.param in SCENARIOS else "others"
    )
    return jobs[request.param]


def test_the_head_is_trained_in_full_and_saved_in_the_shards(run: Left) -> None:
    """Known failures elsewhere: `score.weight` not saved, saved as [0], or with a LoRA on it."""
    full, start = run.stitched(), run.stitched("start")
    adapted = run.wanted.settings.peft.kind != "none"
    key = LIVE_HEAD if adapted else "score.weight"
    hidden = run.json("config.json")["hidden_size"]
    assert full[key].shape == (1, hidden)
    draw = torch.Generator().manual_seed(SETTINGS.seed)
    drawn = torch.randn(1, hidden, generator=draw) / math.sqrt(hidden + 1)
    assert torch.equal(start[key], drawn.bfloat16())
    assert (full[key] != start[key]).float().mean() > 0.9
    assert all(torch.isfinite(t).all() and t.numel() for t in full.values())
    assert [name for name in full if "score" in name and "lora" in name] == []
    if adapted:
        lora = [name for name in full if "lora" in name]
        assert len(full) == len(lora) + 1
        assert all(full[name].any() for name in lora)
        said = run.json("adapter_config.json")
        assert said["task_type"] == "SEQ_CLS"
        assert "score" in said["modules_to_save"]
        assert "score" not in said["target_modules"]


def test_the_config_has_one_label(run: Left, tokenizer) -> None:
    config = run.json("config.json")
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]
    assert config["id2label"] == {"0": "LABEL_0"}  # two labels is transformers' default
    assert config["problem_type"] == "regression"
    assert config["pad_token_id"] == tokenizer.pad_token_id
    assert "quantization_config" not in config


def test_another_process_gets_the_same_scores(run: Left) -> None:
    from transformers import AutoModelForSequenceClassification

    reference = ScorePrint.load(run.out / "print")
    model = load_trained(run, AutoModelForSequenceClassification, num_labels=1, pad_token_id=None)
    torch.set_num_threads(1)
    with torch.no_grad():
        scores = [float(model(torch.tensor([p])).logits[0, 0]) for p in reference.probes]
    drift = score_drift(reference, replace(reference, scores=tuple(scores), engine="test"))
    assert drift.mean_difference < 1e-3
    assert drift.unit > 0.1
    assert reference.noise is not None
    assert reference.noise < 0.05 * drift.unit


def test_every_stage_trains_the_same(left: dict[str, Left]) -> None:
    assert left["full_zero3"].losses == pytest.approx(left["full_zero1"].losses, abs=0.02)
    for one in left.values():
        assert one.losses[-1] < 0.5 * one.losses[0]
