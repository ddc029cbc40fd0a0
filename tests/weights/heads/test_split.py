"""Split a policy and its value head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.core.errors import ContractError
from tasks.weights.heads import detect, read_folder, write_value_head
from tests.weights.adapters.making import save, train
from tests.weights.families.making import load
from tests.weights.heads import making
from tests.weights.heads.making import HIDDEN, head_tensors, serve
from tests.weights.making import state_of


def split(folder: Path, root: Path) -> tuple[Path, Path]:
    """Write policy and head, each to a folder of its own; the policy must have no trace of it."""
    policy, head = root / "policy", root / "head"
    policy.mkdir()
    head.mkdir()
    detected = detect(read_folder(folder))
    serve(detected, policy)
    write_value_head(detected, head)
    assert not [*policy.glob("*.bin"), *policy.glob("value_head*")]
    assert (policy / "tokenizer.json").is_file() == (folder / "tokenizer.json").is_file()
    assert_head(head)
    return policy, head


def assert_head(folder: Path) -> None:
    """Require the head's tensors, and its two files alone."""
    stored = load_file(folder / "value_head.safetensors")
    assert stored.keys() == head_tensors().keys()
    assert all(torch.equal(stored[key], tensor) for key, tensor in head_tensors().items())
    assert {path.name for path in folder.iterdir()} == {"value_head.json", "value_head.safetensors"}


@pytest.mark.parametrize("prefix", ["", "pretrained_model."])
def test_a_trl_policy_and_its_head_are_split(tmp_path: Path, prefix: str) -> None:
    model = making.save_trl(tmp_path / "ppo", "llama", prefix=prefix)
    policy, _ = split(tmp_path / "ppo", tmp_path)
    with torch.no_grad():
        logits = load(policy, torch.float32)(making.IDS).logits
        assert torch.equal(logits, model(making.IDS).logits)
    assert not [name for name in state_of(policy) if "v_head" in name]


@pytest.mark.parametrize("trl", [False, True])
def test_an_adapter_with_a_head_beside_it(tmp_path: Path, trl: bool) -> None:
    """LLaMA-Factory's side file, and TRL's: a `pytorch_model.bin` with only the head."""
    from peft import LoraConfig

    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    folder = save(train(making.causal("qwen"), config), tmp_path / "adapter")
    torch.save(head_tensors(), folder / ("pytorch_model.bin" if trl else "value_head.bin"))
    detected = detect(read_folder(folder))
    assert detected.head is not None
    assert detected.head.dialect == ("trl" if trl else "llamafactory")
    assert not detected.is_of_reward
    head = tmp_path / "head"
    head.mkdir()
    write_value_head(detected, head)
    assert_head(head)


def test_a_critics_head_keeps_its_normalisation(tmp_path: Path) -> None:
    model = making.save_openrlhf(tmp_path / "c", "llama", name="CriticModel", mean=0.5, std=2.0)
    head = tmp_path / "head"
    head.mkdir()
    detected = detect(read_folder(tmp_path / "c"))
    with pytest.raises(ContractError, match="critic"):
        serve(detected, head)
    write_value_head(detected, head)
    document = json.loads((head / "value_head.json").read_text())
    assert (document["role"], document["mean"], document["std"]) == ("value", 0.5, 2.0)
    stored = load_file(head / "value_head.safetensors")
    assert torch.equal(stored["v_head.summary.weight"], model.score.weight)


def test_folders_that_cannot_be_split_are_refused(tmp_path: Path) -> None:
    making.save_trl(tmp_path / "mixed", "qwen")
    path = tmp_path / "mixed" / "model.safetensors"
    odd = {"pretrained_model.model.norm.weight": torch.ones(HIDDEN)}
    save_file({**load_file(path), **odd}, path, metadata={"format": "pt"})
    making.save_llamafactory(tmp_path / "empty", "qwen")
    side = tmp_path / "empty" / "value_head.safetensors"
    save_file({"v_head.summary.weight": torch.zeros(0)}, side, metadata={"format": "pt"})
    making.save_llamafactory(tmp_path / "two", "qwen")
    torch.save(head_tensors(), tmp_path / "two" / "value_head.bin")
    for folder, thing in (("mixed", "model.norm.weight"), ("empty", "ZeRO-3"), ("two", "two")):
        with pytest.raises(ContractError, match=thing):
            serve(detect(read_folder(tmp_path / folder)), tmp_path)
    diverged = {name: torch.full_like(t, torch.nan) for name, t in head_tensors().items()}
    save_file(diverged, side, metadata={"format": "pt"})
    with pytest.raises(ContractError, match=r"v_head\.summary\.weight"):
        write_value_head(detect(read_folder(tmp_path / "empty")), tmp_path)
