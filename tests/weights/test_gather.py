"""Shards of training become an adapter or weights that measure like the live model."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tasks.core.errors import ArtifactError, ContractError
from tasks.drift.fingerprint import PROFILES, Fingerprint, drift
from tasks.evaluation.scoring import ModelRef
from tasks.gather import gather
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.stage import StageReport
from tasks.weights.shards import rank_file, read_partitions
from tests.weights.making import (
    Copies,
    Here,
    Spread,
    alter_ranks,
    failed,
    state_of,
    trained_model,
    write_shards,
)

ENGINE = "the training engine in float32"


@pytest.fixture
def run_copy(lora_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(lora_run, tmp_path / "run")


def _gather(out: Path, trained: Path, base: Artifact, scorer: Any = None) -> StageReport:
    log, profile = logging.getLogger("tests.weights"), PROFILES["standard"]
    scorer = scorer or Copies()
    return gather(out, trained=trained, base=base.path, scorer=scorer, profile=profile, log=log)


def _scale(pattern: str, factor: float) -> Callable[[dict, dict], None]:
    def change(tensors: dict, table: dict) -> None:
        for name in tensors:
            if pattern in name and "lora_B" in name:
                tensors[name] *= factor

    return change


def test_an_adapter_is_what_peft_itself_would_save(lora_run, llama, out, tmp_path) -> None:
    """The same bytes twice; and a fingerprint in float32, the reference of later stages."""
    from peft import get_peft_model_state_dict

    report = _gather(out, lora_run, llama, Here())
    expected = get_peft_model_state_dict(trained_model(llama.path, Spread(world_size=3), seed=1))
    state = state_of(out, "adapter_model")
    assert failed(report.checks) == []
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert report.drift is not None
    assert report.drift.mean_kl == 0.0
    names = {path.name for path in out.iterdir()}
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= names
    assert "config.json" not in names
    (again := tmp_path / "again").mkdir()
    _gather(again, lora_run, llama)
    weights = "adapter_model.safetensors"
    assert (again / weights).read_bytes() == (out / weights).read_bytes()

    live = Fingerprint.load(lora_run / "fingerprint.fp")
    exact = Fingerprint.load(out / "fingerprint.fp")
    assert (live.dtype, exact.dtype) == ("bfloat16", "float32")
    noise = exact.formats["bfloat16"]
    assert 0 < 4 * exact.formats["float16"].mean_kl < noise.mean_kl
    apart = drift(exact, live, "bfloat16")
    assert apart.mean_kl > noise.mean_kl, "the sum of rounded products loses part of the adapter"
    bound = report.checks[-1].bound
    assert bound is not None
    assert (bound.value, bound.limit) == (apart.mean_kl, max(1e-3, 3 * apart.mean_kl))
    assert drift(exact, Fingerprint.load(out / "base.fp")).mean_kl > 10 * noise.mean_kl


def test_empty_tensors_are_refused_by_name(run_copy, llama: Artifact, out) -> None:
    """PEFT's `save_pretrained` writes such tensors under ZeRO-3: every shape is (0,)."""
    names = json.loads((run_copy / "partitions.json").read_text())["parameters"]
    write_shards(run_copy, {name: torch.empty(0) for name in names}, Spread(world_size=3))
    for path in (run_copy / "shards").iterdir():
        save_file({}, path, metadata={"partitions": "{}"})
    report = _gather(out, run_copy, llama)
    assert len(failed(report.checks)) == len(names) == 28
    assert report.checks[0].name.endswith("lora_A.weight")
    assert not list(out.glob("*.safetensors"))


def test_untrained_and_broken_values_are_refused_by_name(lora_run, llama, tmp_path) -> None:
    q_proj = "layers.0.self_attn.q_proj.lora_A"

    def poison(tensors: dict, table: dict) -> None:
        tensors[next(name for name in tensors if q_proj in name)][3] = math.nan

    def forget(tensors: dict, table: dict) -> None:
        for name in [name for name in tensors if q_proj in name]:
            del tensors[name], table[name]

    for number, (change, ranks, thing) in enumerate(
        [
            (_scale("layers.1.mlp.up_proj", -0.0), range(3), ""),  # a module that saw no data
            (_scale("", -0.0), range(3), "trained lora_B"),
            (poison, [1], q_proj),
            (forget, range(3), q_proj),
        ]
    ):
        run, out = tmp_path / f"run {number}", tmp_path / f"out {number}"
        shutil.copytree(lora_run, run)
        out.mkdir()
        alter_ranks(run, 3, ranks, change)
        if change is forget:
            path = run / "partitions.json"
            table = json.loads(path.read_text())
            kept = {name: p for name, p in table["parameters"].items() if q_proj not in name}
            path.write_text(json.dumps({**table, "parameters": kept}))
        bad = [name for name in failed(_gather(out, run, llama).checks) if "drift" not in name]
        assert len(bad) == (1 if thing else 0)
        assert thing in "".join(bad)


def test_inputs_that_are_not_a_run_of_this_base_are_refused(
    run_copy, lora_run, llama, qwen, out
) -> None:
    with pytest.raises(ArtifactError, match="base"):
        _gather(out, lora_run, qwen)
    victim = run_copy / "shards" / rank_file(2, 3)
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-100])
    with pytest.raises(ArtifactError, match=rank_file(2, 3)):
        _gather(out, run_copy, llama)
    victim.write_bytes(whole)
    old, new = b"q_proj.lora_A.default", b"q_proj.lora_magnitude"
    for file in (run_copy / "partitions.json", *(run_copy / "shards").iterdir()):
        file.write_bytes(file.read_bytes().replace(old, new))
    with pytest.raises(ContractError, match="lora_magnitude"):
        _gather(out, run_copy, llama)
    assert list(out.iterdir()) == []


class OnCpu(Here):
    """Measure on the CPU what was trained elsewhere, and keep the device that was asked for."""

    device = ""

    def reference(self, model: ModelRef, out: Path, **paths: Any) -> Fingerprint:
        self.device = model.device
        return super().reference(replace(model, device="cpu"), out, **paths)


@pytest.mark.parametrize("fault", ["none", "sign"])
def test_on_other_hardware_only_float32_is_compared(run_copy, llama, out, fault: str) -> None:
    path = run_copy / "fingerprint.fp"
    live = replace(Fingerprint.load(path), measured_on={"device": "cuda", "name": "NVIDIA H100"})
    if fault == "sign":
        alter_ranks(run_copy, 3, [0], _scale("layers.0", -1))
    live.save(path)
    scorer = OnCpu()
    checks = _gather(out, run_copy, llama, scorer).checks
    assert failed(checks) == ([] if fault == "none" else [ENGINE])
    assert "drift from the trained model" not in [check.name for check in checks]
    assert checks[-1].name == ENGINE
    assert scorer.device == "cuda"


def test_shards_that_do_not_fit_together_are_named_all_at_once(tmp_path: Path) -> None:
    sizes = {"w": (10,), "tiny": (2,), "matrix": (4, 3)}
    write_shards(
        tmp_path, {n: torch.ones(s).bfloat16() for n, s in sizes.items()}, Spread(world_size=2)
    )

    def message() -> str:
        with pytest.raises(ArtifactError) as caught:
            read_partitions(tmp_path)
        return caught.value.report()

    def shrink(tensors: dict, table: dict) -> None:
        tensors["w"], table["w"]["end"] = tensors["w"][:3].clone(), 3

    def spoil(tensors: dict, table: dict) -> None:
        tensors["w"] = tensors["w"].float()
        table["tiny"]["shape"] = [3]
        tensors["unknown"], table["unknown"] = torch.zeros(1), {"shape": [1], "start": 0, "end": 1}
        del table["matrix"]

    alter_ranks(tmp_path, 2, [0], shrink)
    assert "elements 3 to 5" in message()
    alter_ranks(tmp_path, 2, [1], lambda tensors, table: table["w"].update(start=2, end=7))
    assert rank_file(1, 2) in message()
    alter_ranks(tmp_path, 2, [0], spoil)
    (tmp_path / "shards" / "rank-00007-of-00002.safetensors").write_bytes(b"")
    text = message()
    for thing in ("w: F32", "tiny [3]", "unknown", "matrix", "rank-00007-of-00002"):
        assert thing in text
    (tmp_path / "shards" / rank_file(1, 2)).unlink()
    assert rank_file(1, 2) in message()
