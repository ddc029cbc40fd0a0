"""Plumbline's shards, and DeepSpeed checkpoints of very many ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tasks.audit.checks import zero
from tasks.audit.run import Report, audit
from tasks.weights.deepspeed.checkpoint import read_zero
from tests.audit.making import by_code as codes_of
from tests.audit.making import errors, write_json
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


class TestPlumblineShards:
    def test_of_an_adapter(self, ours: Path) -> None:
        report = audit(ours)
        assert (report.kind, report.ok) == ("shards", True)
        assert report.what == "Plumbline's shards of a LoRA adapter of rank 4 of 2 ranks"
        (finding,) = report.findings
        assert finding.code == "PARTITIONS_WHOLE"
        assert finding.found == "2 ranks, 2 tensors, adapter"
        assert finding.fix == f"python flows/deliver.py source={ours} base=<the base> out=<folder>"

    def test_without_the_settings_of_its_adapter(self, ours: Path) -> None:
        (ours / "adapter_config.json").unlink()
        assert codes_of(audit(ours))["CONFIG_MISSING"] == "warning"

    def test_missing_files_of_a_rank(self, ours: Path) -> None:
        next((ours / "shards").glob("rank-00001-*")).unlink()
        report = audit(ours)
        assert report.kind == "shards"
        assert errors(codes_of(report)) == {"PARTITIONS_UNUSABLE"}

    @pytest.mark.parametrize("text", ["[]", "{", '{"mode": []}', '{"mode": "full"}'])
    def test_an_invalid_table(self, ours: Path, text: str) -> None:
        (ours / "partitions.json").write_text(text)
        report = audit(ours)
        assert report.kind == "shards"
        assert "PARTITIONS_UNUSABLE" in errors(codes_of(report))
        assert "CANNOT_JUDGE" not in codes_of(report)
        json.dumps(report.as_json())


class TestManyRanks:
    @pytest.fixture(autouse=True)
    def few_bytes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(zero, "MAX_PICKLE_BYTES", 1000)

    @pytest.fixture(params=[2, 3])
    def checkpoint(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        root = tmp_path / "zero"
        write(root, [{f"p{i}": torch.randn(8, 4) for i in range(3)}], request.param, 5, 1)
        return root

    def told(self, report: Report) -> dict[str, str]:
        return {finding.code: finding.found for finding in report.findings}

    def test_files_are_counted(self, checkpoint: Path) -> None:
        report = audit(checkpoint)
        reported = self.told(report)
        assert set(reported) >= {"ZERO_NOT_GATHERED", "ZERO_NOT_ALL_READ"}
        assert reported["ZERO_NOT_GATHERED"] == "ZeRO of 5 ranks, 3 trained tensors, step 1"
        assert report.ok
        assert read_zero(checkpoint).world_size == 5  # the reader itself has no limit

    def test_a_missing_rank(self, checkpoint: Path) -> None:
        next(checkpoint.glob("*/*rank_3_*optim_states.pt")).unlink()
        reported = self.told(audit(checkpoint))
        assert reported["ZERO_RANK_MISSING"] == "optim states of 5 ranks, absent: 3"
        assert "ZERO_NOT_GATHERED" not in reported

    def test_rank_0_cut_short(self, checkpoint: Path) -> None:
        path = next(checkpoint.glob("*/*rank_0_*optim_states.pt"))
        path.write_bytes(path.read_bytes()[:-100])
        assert "ZERO_UNUSABLE" in self.told(audit(checkpoint))
