"""Reward models under DeepSpeed: the head has one label, is trained in full, and is saved."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tasks.drift.reward_scores import ScorePrint, score_drift
from tasks.serving.reference.rewards import load_rewarder
from tests.training.model.adapter_jobs import DEFAULT, Adapted
from tests.training.model.jobs import Left, load_trained
from tests.training.model.reward_jobs import REWARDS, SETTINGS

LIVE_HEAD = "base_model.model.score.modules_to_save.default.weight"


@pytest.fixture(
    params=[
        name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in REWARDS
    ]
)
def run(request: pytest.FixtureRequest, adapted: Adapted) -> Left:
    return adapted[request.param]


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


def test_the_loss_falls(run: Left) -> None:
    assert run.losses[-1] < 0.5 * run.losses[0]


def test_a_base_that_pads_with_its_end_token_is_scored_at_the_end(
    base: Path, tmp_path: Path, tokenizer
) -> None:
    """transformers scores at the last token that is not the padding id."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    folder, adapter = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    padded = {**config, "pad_token_id": tokenizer.eos_token_id}
    (folder / "config.json").write_text(json.dumps(padded))
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, pad_token_id=None, dtype=torch.float32
    )
    adapted = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"]))
    adapted.save_pretrained(adapter)
    ids = [*tokenizer("copy bee")["input_ids"], tokenizer.eos_token_id]
    with torch.no_grad():
        live = float(adapted.eval()(torch.tensor([ids])).logits)
    how = {"dtype": "float32", "attn_implementation": "sdpa", "quantization": None}
    rewarder = load_rewarder(folder, adapter=adapter, **how)
    assert rewarder.scores([ids]) == pytest.approx([live], abs=1e-5)


@pytest.mark.slow
def test_every_stage_trains_the_same(adapted: Adapted) -> None:
    sharded, whole = (adapted[f"reward_full_zero{stage}"] for stage in (3, 1))
    assert sharded.losses == pytest.approx(whole.losses, abs=0.02)
