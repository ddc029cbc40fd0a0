"""vLLM's CPU backend loads and runs the output of `convert.quantize`; its drift is small."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.config.after_training import Smoke
from tasks.drift.fingerprint import Drift, Fingerprint, drift
from tasks.evaluation.scoring import ModelRef
from tasks.serving.vllm.job import Job, run_vllm
from tests.weights.adapters.making import quiet
from tests.weights.making import PROBES, ROWS, measure_here, save_tokenizer
from tests.weights.quantized.test_quantize import BOTH, quantize


def _model(folder: Path) -> Path:
    """Make a Qwen2 with heads that vLLM's CPU kernels support, and odd sizes."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=ROWS, hidden_size=192, intermediate_size=336, num_hidden_layers=3,
        num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=128,
        tie_word_embeddings=True, eos_token_id=0, pad_token_id=3,
    )  # fmt: skip
    torch.manual_seed(0)
    with quiet():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                size = 0.5 if "embed" in name else 0.06
                tensor.add_(torch.randn_like(tensor, dtype=torch.float32).to(tensor) * size)
        model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def _reference(folder: Path, tmp_path: Path) -> Path:
    """Return the unquantized model's fingerprint by transformers, at all token ids."""
    positions = sum(len(probe) - 1 for probe in PROBES)
    ids = np.tile(np.arange(ROWS, dtype=np.int32), (positions, 1))
    nothing = np.zeros(positions, np.int32)
    blank = Fingerprint(PROBES, ids, np.zeros(ids.shape, np.float32), nothing, "none")
    blank.save(tmp_path / "blank.fp")
    measure_here(ModelRef(folder), tmp_path / "blank.fp", tmp_path / "reference.fp")
    return tmp_path / "reference.fp"


@pytest.mark.slow
def test_vllm_serves_both_formats_and_the_drift_is_that_of_8_bits(tmp_path: Path) -> None:
    base = _model(tmp_path / "none")
    for scheme in BOTH:
        quantize(base, tmp_path / scheme, scheme)
        save_tokenizer(tmp_path / scheme)
    reference = _reference(base, tmp_path)
    jobs, names = [], ("none", *BOTH)
    for name in names:
        out, prompts = str(tmp_path / f"{name}-out"), [list(range(4, 12)), list(range(50, 70))]
        jobs.append(Job(str(tmp_path / name), out, prompts, 8, 64, reference=str(reference)))
    settings, log = Smoke(threads=2, timeout_s=300), logging.getLogger("tests.weights")
    run_vllm(jobs, settings, log=log, log_path=tmp_path / "vllm.log")
    engine = {name: Fingerprint.load(tmp_path / f"{name}-out" / "fingerprint.fp") for name in names}
    drifts: dict[str, Drift] = {name: drift(engine["none"], engine[name]) for name in BOTH}
    for name, result in drifts.items():
        here = measure_here(ModelRef(tmp_path / name), reference, tmp_path / f"{name}.fp")
        assert 0 < result.mean_kl < 0.02
        assert result.top1_agreement >= 0.9
        assert drift(here, engine[name]).mean_kl < result.mean_kl
    assert drifts["w8a8"].p95_kl < drifts["fp8"].p95_kl
