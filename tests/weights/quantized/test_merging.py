"""Merge into a packed base, whose 4 bits are those that training used."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.core.errors import ConfigError
from tasks.drift.fingerprint import PROFILES
from tasks.gather import gather
from tasks.merge import merge
from tasks.pipeline.artifact import Artifact, Origin, publish, staging
from tests.weights.making import (
    NF4,
    Here,
    Spread,
    copy_reference,
    failed,
    measure_here,
    save_tokenizer,
    state_of,
    write_trained,
)
from tests.weights.quantized.making import same


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, nf4: Path) -> Artifact:
    root = tmp_path_factory.mktemp("stage") / "base"
    with staging(root) as work:
        shutil.copytree(nf4, work, dirs_exist_ok=True)
        save_tokenizer(work)
        return publish(work, root, Origin("base", "prepare", root.name))


@pytest.fixture(scope="module")
def run(base: Artifact) -> Path:
    return write_trained(base.path.parent / "run", base, Spread())


@pytest.fixture(scope="module")
def adapter(base: Artifact, run: Path) -> Path:
    root = base.path.parent / "adapter"
    log = logging.getLogger("tests.weights")
    with staging(root) as work:
        report = gather(
            work, trained=run, base=base.path, scorer=Here(), profile=PROFILES["standard"], log=log
        )
        assert failed(report.checks) == []
        publish(work, root, Origin(report.kind, "gather", root.name))
    return root


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


class TestMerge:
    """The merge stage, on an adapter that peft trained on the packed base."""

    @staticmethod
    def merge(out: Path, base: Artifact, adapter: Path, run: Path, **other: Any) -> Any:
        arguments: dict[str, Any] = {
            "base_mode": "auto",
            "score": measure_here,
            "profile": PROFILES["standard"],
            "log": logging.getLogger("tests.weights"),
        }
        where = {"adapter": adapter, "base": base.path, "trained": run}
        return merge(out, **where, **{**arguments, **other})

    def test_equals_pefts_merge_in_fp32_into_the_dequantized_model(
        self, base: Artifact, adapter: Path, run: Path, out: Path
    ) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        report = self.merge(out, base, adapter, run, rounding="nearest")
        assert failed(report.checks) == []
        assert report.drift is not None
        assert report.notes["merge_base"] == "dequantized"
        model = AutoModelForCausalLM.from_pretrained(base.path).dequantize().float()
        merged = PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()
        written = state_of(out)
        wanted = {name: merged[name].to(torch.bfloat16) for name in written}
        assert same(written, wanted) == []
        assert "quantization_config" not in json.loads((out / "config.json").read_text())
        again, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not {*info["missing_keys"], *info["unexpected_keys"]}
        assert not hasattr(again, "hf_quantizer")

    def test_stored_bits_win_over_the_quantization_in_train_json(
        self, base: Artifact, adapter: Path, run: Path, tmp_path: Path
    ) -> None:
        second = Path(shutil.copytree(run, tmp_path / "run"))
        settings = json.loads((second / "train.json").read_text())
        (second / "train.json").write_text(json.dumps({**settings, "quantization": NF4}))
        for name, trained in {"one": run, "two": second}.items():
            (tmp_path / name).mkdir()
            self.merge(tmp_path / name, base, adapter, trained, score=copy_reference)
        assert same(state_of(tmp_path / "one"), state_of(tmp_path / "two")) == []

    def test_fp32_output_takes_one_pass(
        self, base: Artifact, adapter: Path, run: Path, out: Path
    ) -> None:
        output = {"dtype": "float32", "max_shard_size": "50KB"}
        self.merge(out, base, adapter, run, score=copy_reference, output=output)
        assert {tensor.dtype for tensor in state_of(out).values()} == {torch.float32}
        assert len(list(out.glob("model-*.safetensors"))) > 1

    def test_there_is_no_original(
        self, base: Artifact, adapter: Path, run: Path, out: Path
    ) -> None:
        with pytest.raises(ConfigError, match="these bits are all there is") as caught:
            self.merge(out, base, adapter, run, base_mode="original")
        assert caught.value.hint == "merge.base=auto"
