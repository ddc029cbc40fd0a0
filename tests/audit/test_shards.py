"""Plumbline's shards of ranks: what they hold, and those that are unusable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tasks.audit.run import audit
from tests.audit.making import by_code, errors, write_json
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
    assert (finding.code, finding.found) == ("ZERO_NOT_GATHERED", "2 ranks, 2 tensors, adapter")
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
        assert "ZERO_UNUSABLE" in errors(by_code(report))
        assert "CANNOT_JUDGE" not in by_code(report)
        json.dumps(report.as_json())
