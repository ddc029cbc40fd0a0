"""Full fine-tuning: tensors that are fused in memory are gathered under the base's keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tasks.core.errors import ContractError
from tasks.weights.execute.execute import execute
from tasks.weights.families.gathering import plan_full
from tasks.weights.files.header import TensorInfo
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.plan.contracts import model_facts
from tasks.weights.plan.partitions import read_partitions
from tasks.weights.plan.validate import validate
from tests.weights.families.making import FAMILIES, load, save_base
from tests.weights.making import Spread, state_of, write_shards

DEFAULT = [("qwen2", True), ("mixtral", False), ("deepseek_v3", False)]
SLOW = [(name, False) for name in FAMILIES] + [("gemma3", True), ("falcon", True)]


@pytest.mark.parametrize(
    ("family", "tied", "world"),
    [
        *((*case, 3) for case in DEFAULT),
        *(pytest.param(*case, 1, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_shards_of_live_tensors_become_the_checkpoint_they_came_from(
    tmp_path: Path, family: str, tied: bool, world: int
) -> None:
    base = save_base(tmp_path / "base", family, tied=tied)
    trained = load(base)
    live = {name: parameter.detach() for name, parameter in trained.named_parameters()}
    write_shards(tmp_path, live, Spread(world_size=world, full=True))
    parts = read_partitions(tmp_path)
    (tmp_path / "out").mkdir()
    weights = read_checkpoint(base)
    plan = plan_full(parts.tensors, model_facts(base), base=weights.tensors)
    used = {op.input for op in plan.ops}
    sources = {"trained": parts, **({"base": weights} if "base" in used else {})}
    validate(plan, sources)
    execute(plan, sources, tmp_path / "out", workers=1)
    wanted, actual = state_of(base), state_of(tmp_path / "out")
    assert list(actual) == list(wanted)
    assert all(torch.equal(actual[key], tensor) for key, tensor in wanted.items())
    # The one buffer among them, which no optimiser holds.
    bias = ["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert plan.notes.get("from_base", []) == (bias if family == "deepseek_v3" else [])


def _trained(base: Path) -> dict[str, Any]:
    return {
        name: TensorInfo(tuple(tensor.shape), "F32", 0, 0)
        for name, tensor in load(base).named_parameters()
    }


def test_everything_that_does_not_fit_is_one_error(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "mixtral", tied=False)
    trained = _trained(base)
    del trained["model.norm.weight"]
    trained["model.layers.0.mlp.experts.down_proj"] = TensorInfo((4, 32, 47), "F32", 0, 0)
    trained["value_head.weight"] = TensorInfo((1, 32), "F32", 0, 0)
    weights = read_checkpoint(base)
    with pytest.raises(ContractError) as raised:
        plan_full(trained, model_facts(base), base=weights.tensors)
    report = "\n".join(raised.value.details)
    for thing in ("[4, 32, 47]", "value_head.weight", "model.norm.weight"):
        assert thing in report


def test_frozen_parameters_come_from_the_base_when_asked(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "mixtral", tied=False)
    trained = {name: info for name, info in _trained(base).items() if "layers.1" in name}
    weights = read_checkpoint(base)
    plan = plan_full(trained, model_facts(base), base=weights.tensors, frozen=True)
    assert {op.name for op in plan.ops} == set(weights.tensors)
    assert {op.input for op in plan.ops if "layers.1" in op.name} == {"trained"}
    assert set(plan.notes["from_base"]) == {op.name for op in plan.ops if "layers.1" not in op.name}


def test_a_stored_copy_of_a_tied_head_is_written_too(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "qwen2", tied=True)
    state = state_of(base)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, base / "model.safetensors", metadata={"format": "pt"})
    plan = plan_full(_trained(base), model_facts(base))
    sources = {op.name: op.source for op in plan.ops}
    assert sources["lm_head.weight"] == "trained:model.embed_tokens.weight"
