from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.core.errors import ArtifactError, ContractError
from tasks.drift.fingerprint import EXACT, Drift, Fingerprint
from tasks.evaluation.scoring import ModelRef
from tasks.gather import gather
from tasks.pipeline.artifact import Artifact
from tasks.weights.plan.partitions import rank_file
from tests.weights.making import (
    Spread,
    copy_reference,
    failed,
    measure_here,
    state_of,
    trained_model,
    write_shards,
)


@pytest.fixture
def run_copy(lora_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(lora_run, tmp_path / "run")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def _alter(run: Path, rank: int, change) -> None:
    """Rewrite one rank's file after `change` has altered its tensors and its table."""
    from safetensors import safe_open

    path = run / "shards" / rank_file(rank, 3)
    with safe_open(path, framework="pt") as file:
        table = json.loads(file.metadata()["partitions"])
    tensors = load_file(path)
    change(tensors, table)
    save_file(tensors, path, metadata={"partitions": json.dumps(table)})


def test_adapter_is_what_peft_itself_would_save(lora_run, llama: Artifact, out, log) -> None:
    from peft import get_peft_model_state_dict

    report = gather(out, trained=lora_run, base=llama.path, score=measure_here, log=log)
    model = trained_model(llama.path, Spread(world_size=3), seed=1)
    expected = get_peft_model_state_dict(model)
    state = state_of(out, "adapter_model")
    assert failed(report.checks) == []
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert report.drift is not None
    assert report.drift.mean_kl == 0.0
    names = {path.name for path in out.iterdir()}
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= names
    assert "config.json" not in names


def test_qlora_adapter_measures_as_the_live_model(qlora_run, qwen: Artifact, out, log) -> None:
    report = gather(out, trained=qlora_run, base=qwen.path, score=measure_here, log=log)
    assert failed(report.checks) == []
    assert report.drift is not None
    assert report.drift.mean_kl == 0.0


def test_full_weights_of_a_tied_model(full_run, qwen: Artifact, out, log) -> None:
    report = gather(out, trained=full_run, base=qwen.path, score=measure_here, log=log)
    live = trained_model(qwen.path, Spread(full=True), seed=1)
    state = state_of(out)
    expected = dict(live.named_parameters())
    assert report.kind == "weights"
    assert failed(report.checks) == []
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert "lm_head.weight" not in state


def test_empty_tensors_are_refused_by_name(run_copy, llama: Artifact, out, log) -> None:
    """PEFT's `save_pretrained` writes such tensors under ZeRO-3: every shape is (0,)."""
    names = json.loads((run_copy / "partitions.json").read_text())["parameters"]
    write_shards(run_copy, {name: torch.empty(0) for name in names}, Spread(world_size=3))
    for path in (run_copy / "shards").iterdir():
        save_file({}, path, metadata={"partitions": "{}"})
    report = gather(out, trained=run_copy, base=llama.path, score=copy_reference, log=log)
    assert len(failed(report.checks)) == len(names) == 28
    first = report.checks[0]
    assert first.name.endswith("lora_A.weight")
    assert first.found == "BF16 [0]"
    assert not list(out.glob("*.safetensors"))


def test_lora_b_of_zeros_is_refused_by_name(run_copy, llama: Artifact, out, log) -> None:
    def zero(tensors: dict, table: dict) -> None:
        for name in tensors:
            if "layers.1.mlp.up_proj.lora_B" in name:
                tensors[name] = -torch.zeros_like(tensors[name])

    for rank in range(3):
        _alter(run_copy, rank, zero)
    report = gather(out, trained=run_copy, base=llama.path, score=copy_reference, log=log)
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    assert failed(report.checks) == [f"values of {name}"]
    assert report.drift is None


def test_one_nan_is_refused_by_name(run_copy, llama: Artifact, out, log) -> None:
    def poison(tensors: dict, table: dict) -> None:
        name = next(n for n in tensors if "layers.0.self_attn.q_proj.lora_A" in n)
        tensors[name][3] = float("nan")

    _alter(run_copy, 1, poison)
    report = gather(out, trained=run_copy, base=llama.path, score=copy_reference, log=log)
    bad = [check for check in report.checks if not check.ok]
    assert [check.found for check in bad] == ["1 elements not finite"]
    assert "layers.0.self_attn.q_proj.lora_A" in bad[0].name


def test_a_parameter_that_training_forgot_is_missing(run_copy, llama, out, log) -> None:
    path = run_copy / "partitions.json"
    table = json.loads(path.read_text())
    gone = next(iter(table["parameters"]))
    del table["parameters"][gone]
    path.write_text(json.dumps(table))

    def forget(tensors: dict, places: dict) -> None:
        tensors.pop(gone, None), places.pop(gone, None)

    for rank in range(3):
        _alter(run_copy, rank, forget)
    report = gather(out, trained=run_copy, base=llama.path, score=copy_reference, log=log)
    bad = [check for check in report.checks if not check.ok]
    assert [check.found for check in bad] == ["missing"]


def test_another_base_of_the_same_shape_is_refused(lora_run, qwen: Artifact, out, log) -> None:
    with pytest.raises(ArtifactError, match="wrong base"):
        gather(out, trained=lora_run, base=qwen.path, score=copy_reference, log=log)


def test_truncated_rank_file_is_named_and_nothing_is_written(run_copy, llama, out, log) -> None:
    victim = run_copy / "shards" / rank_file(2, 3)
    victim.write_bytes(victim.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match="truncated") as caught:
        gather(out, trained=run_copy, base=llama.path, score=copy_reference, log=log)
    assert rank_file(2, 3) in caught.value.message
    assert list(out.iterdir()) == []


def test_a_trained_parameter_that_is_not_a_lora_weight_is_refused(
    run_copy, llama, out, log
) -> None:
    path = run_copy / "partitions.json"
    path.write_text(path.read_text().replace("q_proj.lora_A.default", "q_proj.lora_magnitude"))
    for file in (run_copy / "shards").iterdir():
        raw = file.read_bytes()
        file.write_bytes(raw.replace(b"q_proj.lora_A.default", b"q_proj.lora_magnitude"))
    with pytest.raises(ContractError, match="no parameter of adapter"):
        gather(out, trained=run_copy, base=llama.path, score=copy_reference, log=log)


def test_drift_beyond_rounding_fails_the_stage(run_copy, llama: Artifact, out, log) -> None:
    def nudge(tensors: dict, table: dict) -> None:
        for name in tensors:
            if "lora_B" in name:
                tensors[name] *= 1.25

    _alter(run_copy, 0, nudge)
    report = gather(out, trained=run_copy, base=llama.path, score=measure_here, log=log)
    assert failed(report.checks) == ["drift from the trained model"]
    assert report.drift is not None
    assert report.drift.mean_kl > 1e-5


class TestOtherHardware:
    """Trained on a GPU, measured on a CPU; fp32 sums stand in for those of the GPU."""

    GPU: ClassVar = {"device": "cuda", "name": "NVIDIA H100", "attention": "sdpa"}

    def test_the_repeat_noise_says_what_may_differ(self, run_copy, llama, out, log) -> None:
        drifted = self._drift(run_copy, llama, out, log, None)
        assert drifted.mean_kl > EXACT.mean_kl, "on equal hardware this would be a fault"
        assert not self.verdict.ok
        assert self.verdict.name == "drift from the trained model"
        self._drift(run_copy, llama, out, log, self.GPU, drifted.mean_kl / 2)
        assert self.verdict.ok, self.verdict
        assert "trained on NVIDIA H100, sdpa, measured on" in self.verdict.name
        self._drift(run_copy, llama, out, log, self.GPU, drifted.mean_kl / 10)
        assert not self.verdict.ok, "more than rounding explains"

    def test_a_fault_is_caught(self, run_copy, llama, out, log) -> None:
        drifted = self._drift(run_copy, llama, out, log, None)

        def nudge(tensors: dict, table: dict) -> None:
            for name in tensors:
                if "layers.0" in name and "lora_B" in name:
                    tensors[name] *= -1

        _alter(run_copy, 0, nudge)
        self._drift(run_copy, llama, out, log, self.GPU, drifted.mean_kl / 2)
        assert not self.verdict.ok
        assert "mean KL" in self.verdict.found
        assert self.verdict.hint.startswith("the stitched weights do not give")
        assert "gate=" not in self.verdict.hint, "no profile gates gather"

    def test_the_scorer_is_told_where_training_was(self, run_copy, llama, out, log) -> None:
        self._drift(run_copy, llama, out, log, self.GPU)
        assert self.device == "cuda"

    def _drift(self, run, base, out, log, measured_on, noise=None) -> Drift:
        path = run / "fingerprint.fp"
        before = Fingerprint.load(path)
        replace(before, measured_on=measured_on, noise=noise).save(path)

        def in_fp32(model: ModelRef, reference: Path, to: Path) -> Fingerprint:
            self.device = model.device
            return measure_here(replace(model, dtype="float32"), reference, to)

        shutil.rmtree(out)
        out.mkdir()
        report = gather(out, trained=run, base=base.path, score=in_fp32, log=log)
        self.verdict = report.checks[-1]
        assert report.drift is not None
        return report.drift


def test_gathering_twice_gives_the_same_bytes(
    lora_run: Path, llama: Artifact, tmp_path: Path, log: logging.Logger
) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        gather(folder, trained=lora_run, base=llama.path, score=copy_reference, log=log)
    first, second = ({p.name: p.read_bytes() for p in f.iterdir()} for f in folders)
    assert first == second
