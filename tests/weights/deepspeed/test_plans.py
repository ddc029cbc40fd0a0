"""From checkpoints to files: plans as `deliver` makes them, executed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tasks.delivery.plan.gathering import gathered_adapter
from tasks.delivery.plan.planning import prepare
from tasks.delivery.plan.work import TRAINED, Request, Target
from tasks.delivery.recognise import recognise
from tasks.weights.deepspeed.checkpoint import read_zero
from tasks.weights.execute.execute import execute
from tasks.weights.execute.worker import perform
from tasks.weights.plan.operations import Plan

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BUFFERS = {"model.seen", "model.mean"}
"""Buffers that only the test models have; transformers has none, so they are dropped."""


def request(folder: Path, dtype: str = "bfloat16") -> Request:
    """Request a delivery of that checkpoint, without a base."""
    return Request(recognise(folder), None, Target(dtype, 3000), None, None, perform)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dtype"),
    [("full-1", "bfloat16"), ("full-2-universal", "float32"), ("untied-3", "float16")],
)
def test_a_model_is_deepspeeds_cast_once(
    saved: Path, tmp_path: Path, case: str, dtype: str
) -> None:
    work = prepare(request(saved / case, dtype))
    assert work.gather == work.model
    assert Plan.from_json(work.model.as_json()) == work.model
    execute(work.model, work.opened, tmp_path, workers=2)
    written: dict[str, torch.Tensor] = {}
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        written |= load_file(shard)
    expected = load_file(saved / case / "expected.safetensors")
    assert set(written) == set(expected) - set(read_zero(saved / case).tied) - BUFFERS
    assert {d.source for d in work.model.dropped} == {f"{TRAINED}:{key}" for key in BUFFERS}
    for name, have in written.items():
        want = expected[name].to(DTYPES[dtype])
        assert have.dtype == want.dtype, name
        assert torch.equal(have, want), name


@pytest.mark.parametrize("case", ["lora-1", "lora-3-universal"])
def test_an_adapter_has_peft_names_and_no_empty_tensor(
    saved: Path, tmp_path: Path, case: str
) -> None:
    checkpoint = read_zero(saved / case)
    plan, adapter = gathered_adapter(request(saved / case), checkpoint, checkpoint.trained)
    assert not adapter.findings
    execute(plan, {TRAINED: checkpoint}, tmp_path, stem="adapter_model")
    written = load_file(tmp_path / "adapter_model.safetensors")
    expected = load_file(saved / case / "expected.safetensors")
    assert len(written) == 2 * 7 * 2
    for name in checkpoint.trained:
        have = written[name.replace(".default.", ".")]
        assert have.numel() > 0
        assert torch.equal(have, expected[name].to(have.dtype)), name
    kept = {op.key for op in plan.ops}
    assert {d.source.partition(":")[2] for d in plan.dropped} == set(checkpoint.tensors) - kept
