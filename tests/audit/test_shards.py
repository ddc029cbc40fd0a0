"""Plumbline's shards, and DeepSpeed checkpoints of very many ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tasks.audit.checks import zero
from tasks.audit.run import audit
from tasks.weights.deepspeed.checkpoint import read_zero
from tests.audit.making import by_code, errors, write_json
from tests.weights.deepspeed.test_partitions_property import write
from tests.weights.making import Spread, write_shards

LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
NAMES = [f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight" for half in "AB"]


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """Make the shards of an adapter that two ranks trained."""
    root = tmp_path / "ours"
    root.mkdir()
    write_shards(root, {name: torch.ones(4, 16).bfloat16() for name in NAMES}, Spread(world_size=2))
    write_json(root / "adapter_config.json", LORA | {"base_model_name_or_path": "/base"})
    return root


def test_shards_of_an_adapter(ours: Path) -> None:
    report = audit(ours)
    assert (report.kind, report.ok) == ("shards", True)
    (finding,) = report.findings
    assert (finding.code, finding.found) == ("PARTITIONS_WHOLE", "2 ranks, 2 tensors, adapter")
    assert f"source={ours}" in finding.fix
    (ours / "adapter_config.json").unlink()
    assert by_code(audit(ours))["CONFIG_MISSING"] == "warning"


def test_unusable_shards(ours: Path) -> None:
    table = ours / "partitions.json"
    whole = table.read_text()
    for text in ("[]", "{", '{"mode": []}', '{"mode": "full"}', whole):
        table.write_text(text)
        if text is whole:
            next((ours / "shards").glob("rank-00001-*")).unlink()
        report = audit(ours)
        assert report.kind == "shards"
        assert "PARTITIONS_UNUSABLE" in errors(by_code(report))
        assert "CANNOT_JUDGE" not in by_code(report)
        json.dumps(report.as_json())


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_of_many_ranks(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are counted where there are too many bytes to read them all."""
    monkeypatch.setattr(zero, "MAX_PICKLE_BYTES", 1000)
    root = tmp_path / "zero"
    write(root, [{f"p{number}": torch.randn(8, 4) for number in range(3)}], stage, 5, 1)

    def reported() -> dict[str, str]:
        return {finding.code: finding.found for finding in audit(root).findings}

    assert audit(root).ok
    assert "ZERO_NOT_ALL_READ" in reported()
    assert reported()["ZERO_NOT_GATHERED"] == "ZeRO of 5 ranks, 3 trained tensors, step 1"
    assert read_zero(root).world_size == 5  # the reader itself has no limit
    first = next(root.glob("*/*rank_0_*optim_states.pt"))
    data = first.read_bytes()
    first.write_bytes(data[:-100])
    assert "ZERO_UNUSABLE" in reported()
    first.write_bytes(data)
    next(root.glob("*/*rank_3_*optim_states.pt")).unlink()
    assert reported()["ZERO_RANK_MISSING"].endswith(" 3")
    assert "ZERO_NOT_GATHERED" not in reported()
