"""Merge into a packed base, whose 4 bits are those that training used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.core.errors import ConfigError
from tasks.pipeline.artifact import Artifact, Origin, publish, staging
from tasks.pipeline.report import StageReport
from tests.weights.making import (
    NF4,
    Spread,
    failed,
    gathered,
    measure_here,
    merged,
    save_tokenizer,
    state_of,
    write_trained,
)
from tests.weights.quantized.making import pack, same


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, qwen: Artifact) -> Artifact:
    root = tmp_path_factory.mktemp("stage") / "base"
    with staging(root) as work:
        pack(qwen.path, work)
        save_tokenizer(work)
        return publish(work, root, Origin("base", "prepare", root.name))


@pytest.fixture(scope="module")
def run(base: Artifact) -> Path:
    return write_trained(base.path.parent / "run", base, Spread())


@pytest.fixture(scope="module")
def adapter(base: Artifact, run: Path) -> Path:
    return gathered(base.path.parent / "adapter", run, base)


def _merge(out: Path, base: Artifact, adapter: Path, run: Path, **other: Any) -> StageReport:
    out.mkdir()
    return merged(out, adapter, base.path, run, **other)


def test_equals_pefts_merge_in_fp32_into_the_dequantized_model(
    base: Artifact, adapter: Path, run: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    report = _merge(out, base, adapter, run, score=measure_here)
    assert failed(report.checks) == []
    model = AutoModelForCausalLM.from_pretrained(base.path).dequantize().float()
    wanted = PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()
    written = state_of(out)
    assert same(written, {name: wanted[name].to(torch.bfloat16) for name in written}) == []
    again, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not {*info["missing_keys"], *info["unexpected_keys"]}
    assert not hasattr(again, "hf_quantizer")

    second = Path(shutil.copytree(run, tmp_path / "run"))
    settings = json.loads((second / "train.json").read_text())
    (second / "train.json").write_text(json.dumps({**settings, "quantization": NF4}))
    _merge(tmp_path / "stored", base, adapter, second)
    assert same(state_of(tmp_path / "stored"), written) == [], "the stored bits win"
    with pytest.raises(ConfigError) as caught:
        _merge(tmp_path / "original", base, adapter, run, base_mode="original")
    assert "merge.base=auto" in caught.value.hint
