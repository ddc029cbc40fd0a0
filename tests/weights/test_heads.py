"""Policies lose their value head; reward models of every dialect keep their scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.core.errors import ContractError
from tasks.weights.heads import detect, read_folder
from tasks.weights.lora import read_adapter
from tasks.weights.merge import Reward, plan_adapter
from tasks.weights.write import write
from tests.audit.making import edit_json
from tests.weights import heads as making
from tests.weights.heads import head_tensors, rewards, scores, serve
from tests.weights.making import load, near, quiet, save, state_of, train


def convert(folder: Path, out: Path) -> dict[str, object]:
    """Convert, and read the new config.json."""
    out.mkdir()
    serve(detect(read_folder(folder)), out)
    return dict(json.loads((out / "config.json").read_text()))


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of a model in one file, or leave them out."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, metadata={"format": "pt"})


@pytest.mark.parametrize("prefix", ["", "pretrained_model."])
def test_a_trl_policy_without_its_head(tmp_path: Path, prefix: str) -> None:
    model = making.save_trl(tmp_path / "ppo", "llama", prefix=prefix)
    convert(tmp_path / "ppo", tmp_path / "policy")
    with torch.no_grad():
        logits = load(tmp_path / "policy", torch.float32)(making.IDS).logits
        assert torch.equal(logits, model(making.IDS).logits)
    assert not [name for name in state_of(tmp_path / "policy") if "v_head" in name]


def test_a_critic_is_refused(tmp_path: Path) -> None:
    making.save_openrlhf(tmp_path / "c", "llama", name="CriticModel", mean=0.5, std=2.0)
    with pytest.raises(ContractError, match="critic"):
        serve(detect(read_folder(tmp_path / "c")), tmp_path / "out")


def test_folders_that_cannot_be_split_are_refused(tmp_path: Path) -> None:
    making.save_trl(tmp_path / "mixed", "qwen")
    odd = {"pretrained_model.model.norm.weight": torch.ones(making.HIDDEN)}
    change_tensors(tmp_path / "mixed", **odd)
    making.save_llamafactory(tmp_path / "empty", "qwen")
    side = tmp_path / "empty" / "value_head.safetensors"
    save_file({"v_head.summary.weight": torch.zeros(0)}, side, metadata={"format": "pt"})
    making.save_llamafactory(tmp_path / "two", "qwen")
    torch.save(head_tensors(), tmp_path / "two" / "value_head.bin")
    for folder, thing in (("mixed", "model.norm.weight"), ("empty", "ZeRO-3"), ("two", "two")):
        with pytest.raises(ContractError, match=thing):
            serve(detect(read_folder(tmp_path / folder)), tmp_path)


@pytest.mark.parametrize(
    ("family", "name", "prefix"),
    [
        ("qwen", "Qwen2ForSequenceClassification", "score"),
        ("neox", "GPTNeoXForSequenceClassification", "value_head"),
    ],
)
def test_openrlhf_rewards_are_the_same(tmp_path: Path, family: str, name: str, prefix: str) -> None:
    model = making.save_openrlhf(tmp_path / "rm", family, prefix=prefix, mean=1.5, std=2.5)
    if prefix == "value_head":  # the flag of OpenRLHF, which does not say what was trained
        edit_json(tmp_path / "rm" / "config.json", value_head_prefix="score")
        assert len(detect(read_folder(tmp_path / "rm")).notes) == 1
    config = convert(tmp_path / "rm", tmp_path / "out")
    before = (rewards(model, getattr(model, prefix).weight.detach()) - 1.5) / 2.5
    assert near(scores(tmp_path / "out"), before)
    assert config["architectures"] == [name]
    assert (config["mean"], config["std"], config["value_head_prefix"]) == (1.5, 2.5, "score")
    old, new = state_of(tmp_path / "rm"), state_of(tmp_path / "out")
    assert torch.equal(new.pop("score.weight"), old.pop(f"{prefix}.weight"))
    assert old.keys() == new.keys()
    assert all(torch.equal(new[key], old[key]) for key in old)


def test_bias_buffers_and_padding_go_into_config(tmp_path: Path) -> None:
    """`score` has no bias in transformers: it would be left out without an error."""
    model = making.save_openrlhf(tmp_path / "rm", "llama")
    edit_json(tmp_path / "rm" / "config.json", pad_token_id=0)  # <|endoftext|>, which ends texts
    bias, lm_head = torch.tensor([0.375]), torch.ones(making.ROWS, making.HIDDEN)
    buffers = {"mean": torch.tensor([0.25]), "std": torch.tensor([4.0], dtype=torch.bfloat16)}
    change_tensors(tmp_path / "rm", **buffers, **{"score.bias": bias, "lm_head.weight": lm_head})
    config = convert(tmp_path / "rm", tmp_path / "out")
    before = (rewards(model, model.score.weight.detach(), bias) - 0.25) / 4
    # The bias is added after the product's rounding, not within it.
    torch.testing.assert_close(scores(tmp_path / "out"), before, rtol=1e-6, atol=1e-6)
    assert (config["mean"], config["std"], config["pad_token_id"]) == (0.25 - 0.375, 4.0, None)
    left_out = {"lm_head.weight", "score.bias", *buffers}
    assert not left_out & set(state_of(tmp_path / "out"))


def test_other_and_broken_models_are_refused(tmp_path: Path) -> None:
    def refused(folder: str) -> str:
        with pytest.raises(ContractError) as caught:
            convert(tmp_path / folder, tmp_path / f"{folder} out")
        return caught.value.report()

    making.save_openrlhf(tmp_path / "rm", "qwen", mean=1.0, std=-1.0)
    wide = torch.zeros(2, making.HIDDEN + 1)
    change_tensors(tmp_path / "rm", mean=torch.tensor([2.0]), **{"score.weight": wide})
    text = refused("rm")
    for part in ("2 labels", "33 columns", "std is -1.0", "mean: 2.0"):
        assert part in text
    making.save_openrlhf(tmp_path / "lost", "qwen")
    change_tensors(tmp_path / "lost", **{"score.weight": None})
    assert "RewardModel" in refused("lost")
    making.save_llamafactory(tmp_path / "lm", "qwen")
    (tmp_path / "lm" / "value_head.safetensors").unlink()
    detected = detect(read_folder(tmp_path / "lm"))
    assert (detected.head, detected.findings, detected.lora_on) == (None, (), "")
    assert "language model" in refused("lm")


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_a_head_that_was_never_saved_is_refused(tmp_path: Path, targets: Any) -> None:
    """OpenRLHF trains `all-linear` without a task type, so the head's own weight is lost."""
    from peft import LoraConfig

    def merge(base: Path) -> None:
        config = json.loads((base / "config.json").read_text())
        made = plan_adapter(read_adapter(adapter), base, config, **how)
        write(made.plan, made.sources, out)

    base, reward, out = (tmp_path / name for name in ("base", "reward", "out"))
    how: dict[str, Any] = {"model_dtype": "float32", "reward": Reward()}
    with quiet():
        making.causal("qwen").save_pretrained(base)
    wrapped = train(making.classifier(base), LoraConfig(r=4, target_modules=targets))
    adapter = save(wrapped, tmp_path / "adapter")
    with pytest.raises(ContractError, match="head"):
        merge(base)
    if targets == "all-linear":  # the base of another run may be a reward model itself
        detected = detect(read_folder(adapter))
        assert (detected.lora_on, detected.is_of_reward) == ("score", True)
        making.classifier(base).save_pretrained(reward)
        out.mkdir()
        merge(reward)
        ours, theirs = state_of(out), wrapped.merge_and_unload().state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
