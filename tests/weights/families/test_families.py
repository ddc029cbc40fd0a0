"""Every family: the streamed merge equals peft's, and transformers loads the result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.weights.adapters.changes import changes
from tasks.weights.adapters.read import read_adapter
from tasks.weights.execute.execute import Executed, execute
from tasks.weights.families.merging import MergeSettings, plan_merge
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.plan.contracts import model_facts
from tasks.weights.plan.operations import Plan
from tasks.weights.plan.validate import validate
from tasks.weights.proof.recheck import recompute
from tasks.weights.rounding import Rounding
from tests.weights.families.making import (
    FAMILIES,
    load,
    logits,
    merged_by_peft,
    save_adapter,
    save_base,
)
from tests.weights.making import state_of

CASES = [(name, tied) for name in FAMILIES for tied in (False, True)]


def merge(base: Path, adapter: Path, out: Path) -> Plan:
    """Merge as peft does, and return the plan."""
    return merge_with(base, adapter, out, "nearest")[0]


def merge_with(base: Path, adapter: Path, out: Path, rounding: Rounding) -> tuple[Plan, Executed]:
    """Plan, validate, execute, and recompute sampled rows."""
    import shutil

    facts = model_facts(base)
    lora = read_adapter(adapter)
    weights = read_checkpoint(base)
    operands = {f"adapter:{key}": info for key, info in lora.tensors.tensors.items()}
    plan = plan_merge(
        weights.tensors,
        facts,
        changes([(lora, 1.0)], facts.live),
        operands,
        MergeSettings(rounding=rounding),
    )
    sources = {"base": weights, "adapter": lora.tensors}
    validate(plan, sources)
    out.mkdir()
    done = execute(plan, sources, out, workers=1)
    checked = recompute(plan, sources, read_checkpoint(out))
    assert [result for result in checked if result.wrong or result.skipped] == []
    for path in base.glob("*config.json"):
        shutil.copy(path, out)
    return plan, done


@pytest.mark.parametrize(("family", "tied"), CASES, ids=[f"{f}-{t}" for f, t in CASES])
def test_the_merge_equals_pefts_under_the_keys_of_the_base(
    tmp_path: Path, family: str, tied: bool
) -> None:
    base = save_base(tmp_path / "base", family, tied=tied)
    adapter = save_adapter(tmp_path / "adapter", base, family)
    plan = merge(base, adapter, tmp_path / "out")
    reference = merged_by_peft(base, adapter)
    reference.save_pretrained(tmp_path / "peft")
    ours, theirs = state_of(tmp_path / "out"), state_of(tmp_path / "peft")
    assert list(ours) == list(state_of(base))
    assert set(ours) == set(theirs)
    assert sum(bool(op.terms) for op in plan.ops) > len(ours) / 4
    for key, tensor in theirs.items():
        assert torch.equal(ours[key], tensor), key
    assert torch.equal(logits(load(tmp_path / "out")), logits(load(tmp_path / "peft")))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_light_adapter_is_kept_in_every_family(tmp_path: Path, family: str) -> None:
    base = save_base(tmp_path / "base", family, tied=False)
    adapter = save_adapter(tmp_path / "adapter", base, family)
    weights = adapter / "adapter_model.safetensors"
    light = {
        key: tensor * 0.001 if ".lora_B" in key else tensor
        for key, tensor in load_file(weights).items()
    }
    save_file(light, weights)
    _, done = merge_with(base, adapter, tmp_path / "out", "unbiased")
    assert done.nearest_keeps is not None
    assert done.nearest_keeps < 0.9
    assert done.kept == pytest.approx(1.0, abs=0.05)  # of a few thousand weights
