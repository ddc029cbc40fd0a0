"""A delivery of a checkpoint with a record is compared with the model that was trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tasks.core.errors import ArtifactError
from tasks.drift.witness import find_witness
from tasks.pipeline.artifact import read_manifest
from tests.commands import summary_of
from tests.witness.conftest import deliver, train


@pytest.mark.slow
def test_what_was_trained_is_what_is_served(tmp_path: Path, base: Path) -> None:
    """Nothing in the adapter's own files tells that its base was in 4 bits; the record does."""
    source = train(base, tmp_path / "out", "qlora").out / "checkpoint-2"
    (source / "training_args.bin").unlink()
    status, text = deliver(tmp_path, source, f"base={base}", "smoke.engine=transformers")
    assert status == 0, text
    assert "nf4" in text
    notes = read_manifest(tmp_path / "served")["notes"]
    assert notes["merge_base"]["base"] == "dequantized"
    stages = {stage["name"]: stage for stage in summary_of(tmp_path / "runs")["stages"]}
    assert stages["reference"]["drift"]["mean_kl"] < 1e-5
    assert stages["smoke_eval"]["drift"]["mean_kl"] < 1e-3
    status, text = deliver(tmp_path, source, f"base={base}", "merge.base=original", "out=x")
    assert status == 1, text


@pytest.mark.slow
def test_a_reward_model_is_compared_by_its_scores(tmp_path: Path, base: Path) -> None:
    trained = train(base, tmp_path / "out", "reward")
    source, name = trained.out / "checkpoint-2", "adapter_model.safetensors"
    status, text = deliver(tmp_path, source, f"base={base}", "smoke.engine=transformers")
    assert status == 0, text
    shutil.copyfile(trained.out / "checkpoint-1" / name, source / name)
    status, text = deliver(tmp_path, source, f"base={base}", "smoke.engine=transformers")
    assert status == 1, text


@pytest.mark.parametrize(
    ("change", "thing"),
    [
        ({"format": 99}, "99"),
        ({"format": 1, "probes": []}, "quantization"),
        ({"format": 1, "probes": [], "quantization": {}}, r"fingerprint\.fp"),
    ],
)
def test_a_record_that_cannot_be_read(
    tmp_path: Path, change: dict[str, object], thing: str
) -> None:
    assert find_witness(tmp_path) is None
    folder = tmp_path / "plumbline.witness"
    folder.mkdir()
    (folder / "witness.json").write_text(json.dumps(change))
    with pytest.raises(ArtifactError, match=thing):
        find_witness(tmp_path)
