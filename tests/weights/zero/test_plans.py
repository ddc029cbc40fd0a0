"""From checkpoints to files: the engine runs what is planned here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tasks.errors import ContractError
from tasks.weights.deepspeed.checkpoint import read_zero
from tasks.weights.deepspeed.plans import INPUT, plan_adapter, plan_model
from tasks.weights.execute import execute
from tasks.weights.plan import Plan
from tasks.weights.validate import validate

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("case", ["full-1", "full-2-universal", "full-3", "untied-3"])
def test_a_model_is_deepspeeds_cast_once(
    saved: Path, tmp_path: Path, case: str, dtype: str
) -> None:
    checkpoint = read_zero(saved / case)
    plan = plan_model(checkpoint, dtype=dtype, max_shard_bytes=3000)
    assert Plan.from_json(plan.as_json()) == plan
    sources = {INPUT: checkpoint}
    validate(plan, sources, out=tmp_path)
    execute(plan, sources, tmp_path, workers=2)
    found: dict[str, torch.Tensor] = {}
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        found |= load_file(shard)
    expected = load_file(saved / case / "expected.safetensors")
    assert set(found) == set(expected) - set(checkpoint.tied)
    for name, have in found.items():
        want = expected[name].to(DTYPES[dtype]) if have.is_floating_point() else expected[name]
        assert have.dtype == want.dtype, name
        assert torch.equal(have, want), name


@pytest.mark.parametrize("case", ["lora-1", "lora-2-trained", "lora-3", "lora-3-universal"])
def test_an_adapter_has_peft_names_and_no_empty_tensor(
    saved: Path, tmp_path: Path, case: str
) -> None:
    checkpoint = read_zero(saved / case)
    plan = plan_adapter(checkpoint)
    validate(plan, {INPUT: checkpoint}, out=tmp_path)
    execute(plan, {INPUT: checkpoint}, tmp_path, stem="adapter_model")
    found = load_file(tmp_path / "adapter_model.safetensors")
    expected = load_file(saved / case / "expected.safetensors")
    assert len(found) == 2 * 7 * 2
    for name in checkpoint.trained:
        have = found[name.replace(".default.", ".")]
        assert have.numel() > 0
        assert torch.equal(have, expected[name].to(torch.bfloat16)), name
    kept = {op.key for op in plan.ops}
    assert {one.source.partition(":")[2] for one in plan.dropped} == set(checkpoint.tensors) - kept


def test_a_plan_of_the_wrong_kind_is_refused(saved: Path) -> None:
    with pytest.raises(ContractError, match="of an adapter, not of a model"):
        plan_model(read_zero(saved / "lora-3"), dtype="BF16")
    with pytest.raises(ContractError, match="no parameter of adapter") as raised:
        plan_adapter(read_zero(saved / "full-3"))
    assert len(raised.value.details) > 20
    with pytest.raises(ContractError, match="no parameter was trained"):
        plan_adapter(read_zero(saved / "full-0"))


def test_two_tensors_of_one_key_are_refused(saved: Path) -> None:
    with pytest.raises(ContractError, match="both become x"):
        plan_model(read_zero(saved / "full-3"), dtype="BF16", rename=lambda _: "x")
