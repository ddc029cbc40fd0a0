"""Reward models and value heads of all tools; scores and heads are the same after delivery."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.delivery.conftest import Done
from tests.weights.adapters.making import quiet, save, train
from tests.weights.heads.making import (
    causal,
    change_config,
    head_tensors,
    openrlhf_model,
    rewards,
    save_openrlhf,
    save_trl,
    scores,
)
from tests.weights.heads.test_merging import TARGETS, classifier
from tests.weights.making import save_tokenizer, state_of
from tests.weights.rounding import near

Run = Callable[..., Done]
SAME = "convert.dtype=float32"


def config_of(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "config.json").read_text()))


def head_artifact(done: Done, tmp_path: Path) -> dict[str, torch.Tensor]:
    """Return the artifact with the value head, and check that OUT has no part of it."""
    (stage,) = (entry for entry in done.summary["stages"] if entry["name"] == "value_head")
    folder = Path(stage["artifact"])
    assert folder.is_relative_to(tmp_path / "runs" / "artifacts" / "value_head")
    assert not [path.name for path in (tmp_path / "out").iterdir() if "head" in path.name]
    assert not [name for name in state_of(tmp_path / "out") if "v_head" in name]
    return load_file(folder / "value_head.safetensors")


def base_of(folder: Path, family: str = "qwen", heads: int = 4) -> Path:
    """Save a language model in fp32 and its tokenizer."""
    with quiet():
        causal(family, heads=heads).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def same(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return actual.keys() == wanted.keys() and all(torch.equal(actual[k], wanted[k]) for k in wanted)


@pytest.mark.parametrize("prefix", ["score", "value_head"])
def test_an_openrlhf_reward_model(either: Run, prefix: str, tmp_path: Path) -> None:
    model = save_openrlhf(tmp_path / "rm", "llama", prefix=prefix, mean=1.5, std=2.5)
    done = either(f"source={tmp_path / 'rm'}", f"out={tmp_path / 'out'}", SAME)
    assert done.code == 0, done.output
    assert done.stages == ["audit", "convert"]
    with torch.no_grad():
        raw = rewards(model, getattr(model, prefix).weight)
    assert near(scores(tmp_path / "out"), (raw - torch.tensor(1.5)) / torch.tensor(2.5))
    config = config_of(tmp_path / "out")
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert (config["mean"], config["std"]) == (1.5, 2.5)


def test_a_reward_model_in_bf16(either: Run, tmp_path: Path) -> None:
    """In bf16, with 8 bits of precision, scores of about 1 may differ by 2 %."""
    model = save_openrlhf(tmp_path / "rm", "qwen")
    done = either(f"source={tmp_path / 'rm'}", f"out={tmp_path / 'out'}")
    assert done.code == 0, done.output
    with torch.no_grad():
        before = rewards(model, model.score.weight)
    torch.testing.assert_close(scores(tmp_path / "out"), before, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("wrapper", ["", "pretrained_model."])
def test_a_trl_policy_with_its_value_head(either: Run, wrapper: str, tmp_path: Path) -> None:
    policy = save_trl(tmp_path / "ppo", "llama", prefix=wrapper)
    done = either(f"source={tmp_path / 'ppo'}", f"out={tmp_path / 'out'}", SAME)
    assert done.code == 0, done.output
    assert done.stages == ["audit", "convert", "value_head"]
    assert same(state_of(tmp_path / "out"), policy.state_dict())
    assert same(head_artifact(done, tmp_path), head_tensors())


@pytest.mark.parametrize("normalised", [False, True])
def test_a_reward_adapter_and_its_base(either: Run, normalised: bool, tmp_path: Path) -> None:
    from peft import LoraConfig

    base = base_of(tmp_path / "base", "llama")
    wrapped = train(
        classifier("llama", base),
        LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["score"]),
    )
    adapter = save(wrapped, tmp_path / "adapter")
    mean, std = (0.5, 2.0) if normalised else (0.0, 1.0)
    if normalised:  # OpenRLHF writes the model's config.json beside its adapter
        (adapter / "config.json").write_text((base / "config.json").read_text())
        change_config(adapter, mean=mean, std=std)
    done = either(
        f"source={adapter}", f"base={base}", "merge.base=original", f"out={tmp_path / 'out'}", SAME
    )
    assert done.code == 0, done.output
    assert done.stages == ["audit", "merge", "convert"]
    with quiet():
        merged = wrapped.merge_and_unload()
    assert same(state_of(tmp_path / "out"), merged.state_dict())
    raw = rewards(merged, merged.score.weight.detach())
    assert near(scores(tmp_path / "out"), (raw - mean) / std)


@pytest.mark.parametrize("pickled", [False, True])
def test_a_llamafactory_adapter_with_a_value_head_beside_it(
    either: Run, pickled: bool, tmp_path: Path
) -> None:
    from peft import LoraConfig

    base = base_of(tmp_path / "base")
    wrapped = train(causal("qwen"), LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"))
    adapter = save(wrapped, tmp_path / "adapter")
    if pickled:
        torch.save(head_tensors(), adapter / "value_head.bin")
    else:
        save_file(head_tensors(), adapter / "value_head.safetensors")
    done = either(
        f"source={adapter}", f"base={base}", "merge.base=original", f"out={tmp_path / 'out'}", SAME
    )
    assert done.code == 0, done.output
    assert done.stages == ["audit", "merge", "convert", "value_head"]
    with quiet():
        merged = wrapped.merge_and_unload().state_dict()
    actual = state_of(tmp_path / "out")
    assert all(torch.equal(tensor, merged[name]) for name, tensor in actual.items())
    assert same(head_artifact(done, tmp_path), head_tensors())


def test_a_reward_adapter_without_its_head_is_refused(here: Run, tmp_path: Path) -> None:
    from peft import LoraConfig

    base = base_of(tmp_path / "base")
    wrapped = train(classifier("qwen", base), LoraConfig(r=4, target_modules="all-linear"))
    adapter = save(wrapped, tmp_path / "adapter")
    done = here(
        f"source={adapter}", f"base={base}", "merge.base=original", f"out={tmp_path / 'out'}"
    )
    assert done.code == 2, done.output
    assert "HEAD_BASE_LOST" in done.output
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "out").exists()


def test_an_openrlhf_reward_adapter_without_its_head(here: Run, tmp_path: Path) -> None:
    """peft records only the class; merged as a language model it would be served without error."""
    from peft import LoraConfig

    asked = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    wrapped = train(openrlhf_model("qwen"), asked)
    save(wrapped, tmp_path / "adapter")
    recorded = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert recorded["auto_mapping"]["base_model_class"] == "RewardModel"
    base = base_of(tmp_path / "base")
    done = here(f"source={tmp_path / 'adapter'}", f"base={base}", f"out={tmp_path / 'out'}", SAME)
    assert (done.code, (tmp_path / "out").exists()) == (2, False), done.output
    assert "HEAD_MISSING" in done.output
    assert "trained on a RewardModel" in done.output


def test_a_critic_is_refused_with_the_audits_words(here: Run, tmp_path: Path) -> None:
    save_openrlhf(tmp_path / "critic", "qwen", name="CriticModel")
    done = here(f"source={tmp_path / 'critic'}", f"out={tmp_path / 'out'}")
    assert (done.code, (tmp_path / "out").exists()) == (2, False)
    assert "HEAD_OF_CRITIC" in done.output
    assert "serve the policy" in done.output
    assert "write_value_head" not in done.output
