"""Reward adapters: merged models score like the trained ones; unusable adapters are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.core.errors import ContractError
from tasks.weights.adapters.read import read_adapter
from tasks.weights.execute.execute import execute
from tasks.weights.families.merging import MergeSettings
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.heads.detect import detect
from tasks.weights.heads.folder import read_folder
from tasks.weights.heads.merging import is_reward_adapter, merged_reward
from tasks.weights.plan.operations import Plan
from tasks.weights.plan.validate import validate
from tests.weights.adapters.making import quiet, save, train
from tests.weights.heads.making import causal, config_of, head_tensors, rewards, scores
from tests.weights.making import state_of
from tests.weights.rounding import near

TARGETS = ["q_proj", "v_proj", "down_proj"]


def classifier(family: str, base: Path) -> Any:
    """Return the base with a new head of one label in fp32, as training does."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(9)
    with quiet():
        return AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=1, dtype=torch.float32
        ).eval()


def made(tmp_path: Path, family: str, **config: Any) -> tuple[Path, Path, Any]:
    """Make a base, an adapter trained on it, and the trained model."""
    from peft import LoraConfig

    base = tmp_path / "base"
    with quiet():
        causal(family).save_pretrained(base)
    wrapped = train(classifier(family, base), LoraConfig(r=4, **config))
    return base, save(wrapped, tmp_path / "adapter"), wrapped


def merge(base: Path, adapter: Path, out: Path) -> Plan:
    """Plan, validate, execute, and write config.json."""
    lora, config = read_adapter(adapter), json.loads((base / "config.json").read_text())
    weights = read_checkpoint(base)
    parted = merged_reward(lora, weights, config, MergeSettings(), dtype="float32")
    validate(parted.plan, parted.sources)
    out.mkdir()
    execute(parted.plan, parted.sources, out, workers=1)
    (out / "config.json").write_text(json.dumps(parted.config))
    return parted.plan


@pytest.mark.parametrize(
    ("family", "declared"), [("qwen", "task_type"), ("llama", "modules_to_save")]
)
def test_a_saved_head_is_merged(tmp_path: Path, family: str, declared: str) -> None:
    extra = {"task_type": "SEQ_CLS"} if declared == "task_type" else {"modules_to_save": ["score"]}
    base, adapter, wrapped = made(tmp_path, family, target_modules=TARGETS, **extra)
    detected = detect(read_folder(adapter))
    assert detected.head is not None
    assert (detected.head.dialect, detected.head.role) == ("peft", "reward")
    assert is_reward_adapter(read_folder(adapter))
    plan = merge(base, adapter, tmp_path / "out")
    with quiet():
        merged = wrapped.merge_and_unload()
    theirs, ours = merged.state_dict(), state_of(tmp_path / "out")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert near(scores(tmp_path / "out"), rewards(merged, merged.score.weight.detach()))
    dropped = {entry.source for entry in plan.dropped}
    assert dropped == ({"base:lm_head.weight"} if family == "llama" else set())


def test_the_normalisation_beside_the_adapter_is_kept(tmp_path: Path) -> None:
    base, adapter, wrapped = made(tmp_path, "qwen", target_modules=TARGETS, task_type="SEQ_CLS")
    beside = {**json.loads((base / "config.json").read_text()), "mean": 0.5, "std": 2.0}
    (adapter / "config.json").write_text(json.dumps(beside))
    merge(base, adapter, tmp_path / "out")
    with quiet():
        merged = wrapped.merge_and_unload()
    before = (rewards(merged, merged.score.weight.detach()) - 0.5) / 2.0
    assert near(scores(tmp_path / "out"), before)


def test_a_policys_adapter_is_not_a_reward_adapter(tmp_path: Path) -> None:
    from peft import LoraConfig

    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    folder = save(train(causal("qwen"), config), tmp_path / "adapter")
    assert not is_reward_adapter(read_folder(folder))
    torch.save(head_tensors(), folder / "value_head.bin")
    assert not is_reward_adapter(read_folder(folder))


@pytest.mark.parametrize("targets", ["all-linear", TARGETS])
def test_a_head_that_was_never_saved_is_refused(tmp_path: Path, targets: Any) -> None:
    """OpenRLHF trains `all-linear` without a task type, so the head's own weight is lost."""
    base, adapter, _ = made(tmp_path, "qwen", target_modules=targets)
    if targets == "all-linear":
        assert detect(read_folder(adapter)).lora_on == "score"
        assert is_reward_adapter(read_folder(adapter))
    with pytest.raises(ContractError, match="head"):
        merge(base, adapter, tmp_path / "out")


def test_lora_on_the_head_of_a_reward_model_merges(tmp_path: Path) -> None:
    from peft import LoraConfig
    from transformers import AutoModelForSequenceClassification

    config = config_of("qwen")
    config.num_labels = 1
    torch.manual_seed(4)
    with quiet():
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
        model.save_pretrained(tmp_path / "base")
    wrapped = train(model, LoraConfig(r=4, target_modules="all-linear"))
    adapter = save(wrapped, tmp_path / "adapter")
    merge(tmp_path / "base", adapter, tmp_path / "out")
    with quiet():
        theirs = wrapped.merge_and_unload().state_dict()
    ours = state_of(tmp_path / "out")
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
