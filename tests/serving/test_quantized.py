"""The quantised version of a served folder: its files, its layers, its limits, its engine."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tasks.audit.check import Severity
from tasks.audit.run import audit
from tasks.drift.fingerprint import DriftLimit, quantized_profile
from tasks.evaluation.prompts import Tools
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.pipeline.stage import StageReport
from tasks.quantize import heldout_loss, quantize, row_tokens
from tasks.smoke_eval import smoke_eval
from tests.serving.test_smoke_eval import LENIENT

LOG = logging.getLogger("tests.serving")
ANY = DriftLimit(mean_kl=10.0, p95_kl=100.0, top1_agreement=0.0)


@pytest.fixture(scope="module")
def rows(data: Path) -> Path:
    """A dataset folder with training rows, too."""
    shutil.copy(data / "heldout.jsonl", data / "train.jsonl")
    return data


@pytest.fixture
def quantized(
    served: Path, trained: Path, rows: Path, scorer: ReferenceScorer, tmp_path: Path
) -> Callable[..., tuple[Path, StageReport]]:
    """Quantise `served` into a new folder; arguments override."""

    def call(scheme: str, **changes: Any) -> tuple[Path, StageReport]:
        out = tmp_path / f"{scheme}-{len(list(tmp_path.iterdir()))}"
        out.mkdir()
        arguments: dict[str, Any] = {
            "served": served, "reference": trained, "data": rows, "scorer": scorer, "rows": 4,
            "log_path": tmp_path / "quantize.log", "max_shard_size": "5GB", "profile": ANY,
            "log": LOG,
        }  # fmt: skip
        return out, quantize(out, scheme=scheme, **{**arguments, **changes})

    return call


def test_the_quantised_folder_stands_beside_the_one_in_16_bits(
    quantized: Callable[..., tuple[Path, StageReport]], served: Path
) -> None:
    before = {path.name: path.read_bytes() for path in served.iterdir()}
    out, report = quantized("w8a8", max_shard_size="60KB")
    assert [check for check in report.checks if not check.ok] == []
    assert {path.name: path.read_bytes() for path in served.iterdir()} == before
    assert len(list(out.glob("*.safetensors"))) > 1
    assert {"tokenizer.json", "generation_config.json"} <= {path.name for path in out.iterdir()}
    assert 0.4 < report.metrics["size_ratio"] < 0.9
    assert report.notes["left_alone"] == ["lm_head"]
    assert report.notes["calibration"] == {"source": "data: train.jsonl", "rows": 4}
    errors = [error for _, error in report.notes["layers"]]
    assert errors == sorted(errors, reverse=True)
    assert 0 < errors[0] < 0.05, "8 bits lose about 1 % of a layer's output"
    before, after = (report.metrics[f"quantized/loss/{when}"] for when in ("before", "after"))
    assert 0 < abs(after - before) < 0.02 < before
    assert report.drift is not None
    assert report.drift.mean_kl > 0
    assert [
        str(finding) for finding in audit(out).findings if finding.severity is Severity.ERROR
    ] == []


def test_a_model_that_predicts_held_out_rows_worse_is_refused(
    served: Path, trained: Path, rows: Path, scorer: ReferenceScorer, tmp_path: Path
) -> None:
    """Logits that are eight times as large, in the place of a quantised version."""
    tokens = row_tokens(scorer, served, rows, "heldout.jsonl", 4, reference=trained)
    model, other = ModelRef(served), ModelRef(shutil.copytree(served, tmp_path / "other"))
    tensors = load_file(other.path / "model.safetensors")
    tensors["model.norm.weight"] *= 8
    save_file(tensors, other.path / "model.safetensors", metadata={"format": "pt"})
    limit = quantized_profile("gguf:q4_k_m")
    same, check = heldout_loss(scorer, model, model, tokens, limit)
    assert check.ok
    assert same["quantized/loss/before"] == same["quantized/loss/after"]
    _, worse = heldout_loss(scorer, model, other, tokens, limit)
    _, better = heldout_loss(scorer, other, model, tokens, limit)
    assert (worse.ok, better.ok) == (False, True)


@pytest.mark.slow
def test_vllm_serves_it_beside_the_one_in_16_bits(
    quantized: Callable[..., tuple[Path, StageReport]], served: Path, trained: Path,
    rows: Path, scorer: ReferenceScorer, tmp_path: Path,
) -> None:  # fmt: skip
    folder, made = quantized("fp8")
    (tmp_path / "report").mkdir()
    report = smoke_eval(
        tmp_path / "report", prompts="chat", quantized=True, max_eval_drop=100.0,
        served=folder, base=served, data=rows, reference=trained,
        settings=replace(LENIENT, engine="vllm"), profile=ANY,
        tools=Tools(scorer=scorer, log_path=tmp_path / "log"), log=LOG,
    )  # fmt: skip
    assert [check for check in (*made.checks, *report.checks) if not check.ok] == []
    assert report.drift is not None
    assert 0 < report.drift.mean_kl < quantized_profile("fp8").mean_kl
    assert {"quantized/eval/before", "quantized/eval/after"} <= set(report.metrics)
