"""Stages that measure drift from a reference: the measured model, the attention, the verdicts.

The reference child is real. Tests with Prefect and its server are in the long suite.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

from flows.cli.config import compose_config
from flows.delivery.run_delivery import direct, plan
from tasks.delivery.recognise import recognise
from tasks.delivery.recorded import attention_of

LOG = logging.getLogger("tests.deliver")


def eager(shards: Path, folder: Path) -> Path:
    """Copy the shards, with a record of eager attention."""
    shutil.copytree(shards, folder)
    path = folder / "train.json"
    record = json.loads(path.read_text()) | {"attn_implementation": "eager"}
    path.write_text(json.dumps(record))
    return folder


def test_base_and_adapter_unmerged_are_what_the_served_model_is_compared_with(
    adapter: Path, base: Path, tmp_path: Path
) -> None:
    composed = compose_config(
        [
            f"source={adapter}", f"base={base}", "merge.base=original", f"out={tmp_path / 'out'}",
            f"paths.runs={tmp_path / 'runs'}", "smoke.engine=transformers", "smoke.probes=4",
        ],
        config_name="deliver",
    )  # fmt: skip
    summary = direct(plan(composed), LOG, "here")
    assert [stage["name"] for stage in summary["stages"]] == [
        "audit", "reference", "merge", "convert", "smoke_eval",
    ]  # fmt: skip
    assert all(0 <= stage["drift"]["mean_kl"] < 1e-3 for stage in summary["stages"][2:])
    report = json.loads(Path(summary["stages"][-1]["artifact"], "report.json").read_text())
    assert report["engine"] == "transformers"
    assert all(check["ok"] for check in report["checks"])
    assert (tmp_path / "out" / "model.safetensors").is_file()


class TestTheAttention:
    def test_is_the_one_that_training_recorded(
        self, shards: Path, ours: Path, tmp_path: Path
    ) -> None:
        source = eager(shards, tmp_path / "shards")
        composed = compose_config(
            [
                f"source={source}", f"base={ours}", f"out={tmp_path / 'out'}",
                f"paths.runs={tmp_path / 'runs'}", "smoke.engine=transformers",
            ],
            config_name="deliver",
        )  # fmt: skip
        assert plan(composed).delivery.attention == "eager"
        assert not (tmp_path / "runs").exists()

    def test_gathered_adapter_uses_the_attention_of_its_training(
        self, shards: Path, adapter: Path, tmp_path: Path
    ) -> None:
        store = tmp_path / "artifacts"
        trained = eager(shards, store / "shards" / "one")
        fields = {"kind": "shards", "digest": "d1", "tensors": {}, "files": {}, "notes": {}}
        (trained / "manifest.json").write_text(json.dumps({**fields, "inputs": {}}))
        made = Path(shutil.copytree(adapter, tmp_path / "adapter"))
        manifest = {**fields, "kind": "adapter", "digest": "d2", "inputs": {"trained": "d1"}}
        (made / "manifest.json").write_text(json.dumps(manifest))
        assert attention_of(recognise(made), store) == ("eager", "")
        assert attention_of(recognise(made), tmp_path / "elsewhere") == ("sdpa", "")

    def test_that_is_not_installed_is_told(
        self, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = eager(shards, tmp_path / "shards")
        path = source / "train.json"
        path.write_text(path.read_text().replace('"eager"', '"flash_attention_2"'))
        monkeypatch.setattr("tasks.delivery.recorded._installed", lambda _: False)
        attention, warning = attention_of(recognise(source), tmp_path)
        assert attention == "sdpa"
        assert "flash-attn is not installed" in warning
        monkeypatch.setattr("tasks.delivery.recorded._installed", lambda _: True)
        assert attention_of(recognise(source), tmp_path) == ("flash_attention_2", "")

    def test_elsewhere_is_transformers_own(self, adapter: Path, tmp_path: Path) -> None:
        assert attention_of(recognise(adapter), tmp_path) == ("sdpa", "")
