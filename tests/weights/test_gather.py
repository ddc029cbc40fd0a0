from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.core.errors import ArtifactError, ContractError
from tasks.drift.fingerprint import PROFILES, Fingerprint, drift
from tasks.evaluation.scoring import ModelRef
from tasks.gather import gather
from tasks.pipeline.artifact import Artifact
from tasks.weights.plan.partitions import rank_file
from tests.weights.making import (
    Copies,
    Here,
    Spread,
    failed,
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

    report = gather(
        out, trained=lora_run, base=llama.path, scorer=Here(), profile=PROFILES["standard"], log=log
    )
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
    report = gather(
        out, trained=qlora_run, base=qwen.path, scorer=Here(), profile=PROFILES["standard"], log=log
    )
    assert failed(report.checks) == []
    assert report.drift is not None
    assert report.drift.mean_kl == 0.0


def test_full_weights_of_a_tied_model(full_run, qwen: Artifact, out, log) -> None:
    report = gather(
        out, trained=full_run, base=qwen.path, scorer=Here(), profile=PROFILES["standard"], log=log
    )
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
    report = gather(
        out,
        trained=run_copy,
        base=llama.path,
        scorer=Copies(),
        profile=PROFILES["standard"],
        log=log,
    )
    assert len(failed(report.checks)) == len(names) == 28
    first = report.checks[0]
    assert first.name.endswith("lora_A.weight")
    assert first.found == "BF16 [0]"
    assert not list(out.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("halves", "refused"),
    [("layers.1.mlp.up_proj.lora_B", []), ("lora_B", ["trained lora_B"])],
)
def test_only_an_adapter_without_any_effect_is_refused(
    run_copy, llama: Artifact, out, log, halves: str, refused: list[str]
) -> None:
    def zero(tensors: dict, table: dict) -> None:
        for name in tensors:
            if halves in name:
                tensors[name] = -torch.zeros_like(tensors[name])

    for rank in range(3):
        _alter(run_copy, rank, zero)
    report = gather(
        out,
        trained=run_copy,
        base=llama.path,
        scorer=Copies(),
        profile=PROFILES["standard"],
        log=log,
    )
    assert [name for name in failed(report.checks) if "drift" not in name] == refused


def test_one_nan_is_refused_by_name(run_copy, llama: Artifact, out, log) -> None:
    def poison(tensors: dict, table: dict) -> None:
        name = next(n for n in tensors if "layers.0.self_attn.q_proj.lora_A" in n)
        tensors[name][3] = float("nan")

    _alter(run_copy, 1, poison)
    report = gather(
        out,
        trained=run_copy,
        base=llama.path,
        scorer=Copies(),
        profile=PROFILES["standard"],
        log=log,
    )
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
    report = gather(
        out,
        trained=run_copy,
        base=llama.path,
        scorer=Copies(),
        profile=PROFILES["standard"],
        log=log,
    )
    bad = [check for check in report.checks if not check.ok]
    assert [check.found for check in bad] == ["missing"]


def test_another_base_of_the_same_shape_is_refused(lora_run, qwen: Artifact, out, log) -> None:
    with pytest.raises(ArtifactError, match="wrong base"):
        gather(
            out,
            trained=lora_run,
            base=qwen.path,
            scorer=Copies(),
            profile=PROFILES["standard"],
            log=log,
        )


def test_truncated_rank_file_is_named_and_nothing_is_written(run_copy, llama, out, log) -> None:
    victim = run_copy / "shards" / rank_file(2, 3)
    victim.write_bytes(victim.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match="truncated") as caught:
        gather(
            out,
            trained=run_copy,
            base=llama.path,
            scorer=Copies(),
            profile=PROFILES["standard"],
            log=log,
        )
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
        gather(
            out,
            trained=run_copy,
            base=llama.path,
            scorer=Copies(),
            profile=PROFILES["standard"],
            log=log,
        )


def test_drift_beyond_rounding_fails_the_stage(run_copy, llama: Artifact, out, log) -> None:
    def nudge(tensors: dict, table: dict) -> None:
        for name in tensors:
            if "lora_B" in name:
                tensors[name] *= 1.25

    _alter(run_copy, 0, nudge)
    report = gather(
        out, trained=run_copy, base=llama.path, scorer=Here(), profile=PROFILES["standard"], log=log
    )
    assert failed(report.checks)[0] == "drift from the trained model"
    assert report.drift is not None
    assert report.drift.mean_kl > 1e-5


def test_the_reference_of_later_stages_is_in_float32(lora_run, llama: Artifact, out, log) -> None:
    report = gather(
        out, trained=lora_run, base=llama.path, scorer=Here(), profile=PROFILES["standard"], log=log
    )
    live = Fingerprint.load(lora_run / "fingerprint.fp")
    exact = Fingerprint.load(out / "fingerprint.fp")
    assert (live.dtype, exact.dtype) == ("bfloat16", "float32")
    noise = exact.formats["bfloat16"]
    assert 0 < 4 * exact.formats["float16"].mean_kl < noise.mean_kl
    apart = drift(exact, live, "bfloat16")
    assert apart.mean_kl > noise.mean_kl, "the sum of rounded products loses part of the adapter"
    check = report.checks[-1]
    assert check.bound is not None
    assert check.bound.value == apart.mean_kl
    assert check.bound.limit == max(1e-3, 3 * apart.mean_kl)
    without = Fingerprint.load(out / "base.fp")
    assert drift(exact, without).mean_kl > 10 * noise.mean_kl


def test_an_engine_that_computes_another_model_is_refused(run_copy, llama, out, log) -> None:
    """A fused kernel in training: the same weights, other numbers, measured on another machine."""
    path = run_copy / "fingerprint.fp"
    live = Fingerprint.load(path)
    logits = live.logprobs * 1.2
    logprobs = logits - torch.logsumexp(torch.from_numpy(logits), -1, keepdim=True).numpy()
    elsewhere = {"device": "cuda", "name": "NVIDIA H100"}
    replace(live, logprobs=logprobs, measured_on=elsewhere).save(path)
    report = gather(
        out, trained=run_copy, base=llama.path, scorer=Here(), profile=PROFILES["standard"], log=log
    )
    assert failed(report.checks) == ["the training engine in float32"]


class TestOtherHardware:
    """Trained on a GPU, measured on a CPU: rounding differs, so only float32 is compared."""

    GPU: ClassVar = {"device": "cuda", "name": "NVIDIA H100", "attention": "sdpa"}

    def test_float32_is_compared_with_the_noise_of_the_format(
        self, run_copy, llama, out, log
    ) -> None:
        checks = self._gather(run_copy, llama, out, log)
        assert failed(checks) == []
        assert "drift from the trained model" not in [check.name for check in checks]
        assert checks[-1].name == "the training engine in float32"
        assert self.device == "cuda", "the scorer is told where training was"

    def test_a_fault_is_caught(self, run_copy, llama, out, log) -> None:
        def nudge(tensors: dict, table: dict) -> None:
            for name in tensors:
                if "layers.0" in name and "lora_B" in name:
                    tensors[name] *= -1

        _alter(run_copy, 0, nudge)
        assert failed(self._gather(run_copy, llama, out, log)) == ["the training engine in float32"]

    def _gather(self, run, base, out, log) -> list:
        path = run / "fingerprint.fp"
        replace(Fingerprint.load(path), measured_on=self.GPU).save(path)
        test = self

        class OnCpu(Here):
            def reference(self, model: ModelRef, out: Path, **paths: Any) -> Fingerprint:
                test.device = model.device
                return super().reference(replace(model, device="cpu"), out, **paths)

        report = gather(
            out, trained=run, base=base.path, scorer=OnCpu(), profile=PROFILES["standard"], log=log
        )
        return list(report.checks)


def test_gathering_twice_gives_the_same_bytes(
    lora_run: Path, llama: Artifact, tmp_path: Path, log: logging.Logger
) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        gather(
            folder,
            trained=lora_run,
            base=llama.path,
            scorer=Copies(),
            profile=PROFILES["standard"],
            log=log,
        )
    first, second = ({p.name: p.read_bytes() for p in f.iterdir()} for f in folders)
    assert first == second
