"""Stages that measure drift from a reference: the measured model, the attention, the verdicts.

The reference child is real. Tests with Prefect and its server are in the long suite.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from flows.cli.config import compose_config
from flows.delivery.run_delivery import direct, plan
from tasks.audit.run import audit
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


def test_a_light_adapter_is_kept_by_default(adapter: Path, base: Path, tmp_path: Path) -> None:
    """Updates are about half a step of bf16; `audit` measures the loss of a merge to nearest."""
    light = tmp_path / "light"
    shutil.copytree(adapter, light)
    tensors = load_file(light / "adapter_model.safetensors")
    tensors = {n: t.float() * (0.01 if "lora_B" in n else 1) for n, t in tensors.items()}
    save_file(tensors, light / "adapter_model.safetensors", metadata={"format": "pt"})
    arguments = [f"source={light}", f"base={base}", "merge.base=original", "smoke.engine=none"]
    places = [f"out={tmp_path / 'out'}", f"paths.runs={tmp_path / 'runs'}"]
    direct(plan(compose_config([*arguments, *places], config_name="deliver")), LOG, "here")
    before, after = (load_file(f / "model.safetensors") for f in (base, tmp_path / "out"))
    gained = nearest = update = 0.0
    for key in tensors:
        if "lora_A" in key:
            name = key.removeprefix("base_model.model.").replace(".lora_A", "")
            exact = 2.0 * tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
            wide = before[name].float()
            update += float((exact * exact).sum())
            gained += float(((after[name].float() - wide) * exact).sum())
            nearest += float((((wide + exact).bfloat16().float() - wide) * exact).sum())
    assert gained / update == pytest.approx(1, abs=0.05)
    assert nearest / update < 0.85
    (finding,) = [f for f in audit(light, base=base, values=True).findings
                  if f.code == "ADAPTER_ROUNDS_AWAY"]  # fmt: skip
    shares = [int(share) / 100 for share in re.findall(r"(\d+)%", finding.found)]
    assert shares[0] == pytest.approx(nearest / update, abs=0.05)


class TestTheAttention:
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
