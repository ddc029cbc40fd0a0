"""Reward models and reward adapters of every dialect: equal scores after conversion, refusals."""

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
from tasks.weights.merge import Reward, plan_adapters
from tasks.weights.plan import Plan
from tasks.weights.write import write
from tests.weights.adapters.making import quiet, save, train
from tests.weights.heads import making
from tests.weights.heads.making import change_config, rewards, scores, serve
from tests.weights.making import state_of
from tests.weights.rounding import near

TARGETS = ["q_proj", "v_proj", "down_proj"]


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
        change_config(tmp_path / "rm", value_head_prefix="score")
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
    change_config(tmp_path / "rm", pad_token_id=0)  # <|endoftext|>, which ends texts
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
        out = tmp_path / f"{folder} out"
        with pytest.raises(ContractError) as caught:
            convert(tmp_path / folder, out)
        assert list(out.iterdir()) == []
        return caught.value.report()

    making.save_openrlhf(tmp_path / "rm", "qwen", mean=1.0, std=-1.0)
    wide = torch.zeros(2, making.HIDDEN + 1)
    change_tensors(tmp_path / "rm", mean=torch.tensor([2.0]), **{"score.weight": wide})
    text = refused("rm")
    for part in ("2 labels", "33 columns", "std is -1.0", "mean: 2.0"):
        assert part in text
    making.save_openrlhf(tmp_path / "critic", "qwen", name="CriticModel")
    assert "critic" in refused("critic")
    making.save_openrlhf(tmp_path / "lost", "qwen")
    change_tensors(tmp_path / "lost", **{"score.weight": None})
    assert "RewardModel" in refused("lost")
    making.save_llamafactory(tmp_path / "lm", "qwen")
    (tmp_path / "lm" / "value_head.safetensors").unlink()
    detected = detect(read_folder(tmp_path / "lm"))
    assert (detected.head, detected.findings, detected.lora_on) == (None, (), "")
    assert "language model" in refused("lm")


def made(tmp_path: Path, family: str, **config: Any) -> tuple[Path, Path, Any]:
    """Make a base, an adapter trained on it, and the trained model."""
    from peft import LoraConfig

    base = tmp_path / "base"
    with quiet():
        making.causal(family).save_pretrained(base)
    wrapped = train(making.classifier(base), LoraConfig(r=4, **config))
    return base, save(wrapped, tmp_path / "adapter"), wrapped


def merge(base: Path, adapter: Path, out: Path) -> Plan:
    """Plan, validate, execute, and write config.json."""
    lora, config = read_adapter(adapter), json.loads((base / "config.json").read_text())
    parted = plan_adapters([(lora, 1.0)], base, config, model_dtype="float32", reward=Reward())
    out.mkdir()
    write(parted.plan, parted.sources, out, workers=1)
    (out / "config.json").write_text(json.dumps(parted.config))
    return parted.plan


def merged_by_peft(wrapped: Any, out: Path) -> Any:
    """Merge with peft, and require that the folder has the same tensors."""
    with quiet():
        merged = wrapped.merge_and_unload()
    ours, theirs = state_of(out), merged.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    return merged


@pytest.mark.parametrize(
    ("family", "declared", "mean", "std"),
    [("qwen", {"task_type": "SEQ_CLS"}, 0.5, 2.0), ("llama", {"modules_to_save": ["score"]}, 0, 1)],
)
def test_an_adapter_with_its_head_is_merged(tmp_path, family, declared, mean, std) -> None:
    """The normalisation in a config.json beside the adapter is kept."""
    base, adapter, wrapped = made(tmp_path, family, target_modules=TARGETS, **declared)
    if std != 1:
        beside = {**json.loads((base / "config.json").read_text()), "mean": mean, "std": std}
        (adapter / "config.json").write_text(json.dumps(beside))
    detected = detect(read_folder(adapter))
    assert detected.head is not None
    assert detected.is_of_reward
    assert (detected.head.dialect, detected.head.role) == ("peft", "reward")
    plan = merge(base, adapter, tmp_path / "out")
    merged = merged_by_peft(wrapped, tmp_path / "out")
    before = (rewards(merged, merged.score.weight.detach()) - mean) / std
    assert near(scores(tmp_path / "out"), before)
    dropped = set(plan.dropped)
    assert dropped == ({"base:lm_head.weight"} if family == "llama" else set())


@pytest.mark.parametrize("targets", ["all-linear", TARGETS])
def test_a_head_that_was_never_saved_is_refused(tmp_path: Path, targets: Any) -> None:
    """OpenRLHF trains `all-linear` without a task type, so the head's own weight is lost."""
    base, adapter, wrapped = made(tmp_path, "qwen", target_modules=targets)
    if targets == "all-linear":
        detected = detect(read_folder(adapter))
        assert (detected.lora_on, detected.is_of_reward) == ("score", True)
    with pytest.raises(ContractError, match="head"):
        merge(base, adapter, tmp_path / "out")
    if targets == "all-linear":  # the base of another run may be a reward model itself
        making.classifier(base).save_pretrained(tmp_path / "reward")
        merge(tmp_path / "reward", adapter, tmp_path / "out")
        merged_by_peft(wrapped, tmp_path / "out")
