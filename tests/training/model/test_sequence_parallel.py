"""Sequence parallelism: losses, gradients and fingerprints as on one rank, to 1e-5 in fp32."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.commands import run_ranks
from tests.tiny import tiny
from tests.training.conftest import save_base
from tests.training.model.sequence_ranks import CASES, MORE_CASES

TOLERANCE = 1e-5
"""Largest difference of a number, and of a gradient relative to its largest number."""

RATIO = 1e-4
"""Largest difference of a log-ratio: both of its sums are hundreds of nats in fp32."""


def run(folder: Path, cases: Sequence[str], *, ranks: int, sharing: int) -> Path:
    """Train these cases in one launch; return the folder of their measurements."""
    folder.mkdir()
    arguments = (str(folder), str(sharing), *cases)
    run_ranks(
        "tests.training.model.sequence_ranks", *arguments, log_path=folder / "log", ranks=ranks
    )
    return folder


def require_same(alone: Path, divided: Path, name: str) -> None:
    """Compare a case's numbers and gradients on several ranks with those on one."""
    expected, measured = (json.loads((f / f"{name}.json").read_text()) for f in (alone, divided))
    pairs = [*zip(expected["steps"], measured["steps"], strict=True)]
    for before, after in [*pairs, (expected["evaluated"], measured["evaluated"])]:
        assert before.keys() == after.keys()
        for key, value in before.items():
            apart = TOLERANCE if key in ("loss", "norm") else RATIO
            assert after[key] == pytest.approx(value, rel=TOLERANCE, abs=apart), (name, key)
    assert measured["print"] == pytest.approx(expected["print"], rel=TOLERANCE, abs=TOLERANCE)
    one, two = (load_file(folder / f"{name}.safetensors") for folder in (alone, divided))
    assert one.keys() == two.keys()
    assert sum(bool(gradient.any()) for gradient in one.values()) > len(one) / 2
    for key, gradient in one.items():
        apart = float((two[key] - gradient).abs().max())
        assert apart <= TOLERANCE * max(float(gradient.abs().max()), 1e-6), (name, key, apart)


def bases(folder: Path, tokenizer: Any, names: Sequence[str]) -> list[str]:
    """Return the cases with a base each: two key heads, one, experts, or a sliding window."""
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 512}
    pair = save_base(folder / "two-key-heads", tokenizer, **sizes)
    single = save_base(folder / "one-key-head", tokenizer, num_key_value_heads=1, **sizes)
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    special = {
        "experts": save_experts(folder / "experts", tokenizer),
        "window": save_base(folder / "window", tokenizer, **sizes, **window),
    }
    usual = [single if i % 2 else pair for i in range(len(names))]
    kinds = (name.partition("-")[0] for name in names)
    chosen = (special.get(kind, base) for kind, base in zip(kinds, usual, strict=True))
    return [f"{name}={base}" for name, base in zip(names, chosen, strict=True)]


def save_experts(path: Path, tokenizer: Any) -> Path:
    """Save a tiny Qwen2-MoE with its tokenizer: four experts, two for each token, a shared one."""
    torch.manual_seed(0)
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
             "shared_expert_intermediate_size": 40, "vocab_size": len(tokenizer)}  # fmt: skip
    config = tiny("Qwen2Moe", max_position_embeddings=512, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_two_ranks_share_rows_exactly(tmp_path: Path, tokenizer: Any) -> None:
    """SFT and DPO, full and LoRA, ZeRO-2 and ZeRO-3, one key head and two, a mixture of experts."""
    cases = bases(tmp_path, tokenizer, list(CASES))
    alone = run(tmp_path / "alone", cases, ranks=1, sharing=1)
    divided = run(tmp_path / "divided", cases, ranks=2, sharing=2)
    for name in CASES:
        require_same(alone, divided, name)
    first = json.loads((divided / "experts-sft-full-zero2.json").read_text())["steps"][0]
    assert first["router_loss"] > 1.0, "two experts of four a token: about 2"


@pytest.mark.slow
def test_every_objective_and_engine(tmp_path: Path, tokenizer: Any) -> None:
    """Also four ranks, as two groups of two and as one of four, with fewer key heads than ranks."""
    cases = bases(tmp_path, tokenizer, list(MORE_CASES))
    alone = run(tmp_path / "alone", cases, ranks=1, sharing=1)
    for ranks, sharing in ((2, 2), (4, 2), (4, 4)):
        divided = run(tmp_path / f"{ranks}-{sharing}", cases, ranks=ranks, sharing=sharing)
        for name in MORE_CASES:
            require_same(alone, divided, name)


@pytest.mark.slow
def test_a_real_vocabulary_and_a_long_row(tmp_path: Path, tokenizer: Any) -> None:
    """8,202 tokens in a row: each of two ranks keeps half of the activations."""
    wide = save_base(tmp_path / "wide", tokenizer, vocab_size=151_936, hidden_size=16,
                     num_hidden_layers=1, max_position_embeddings=512)  # fmt: skip
    far = save_base(tmp_path / "far", tokenizer, max_position_embeddings=8192)
    cases = [f"vocabulary={wide}", f"long={far}"]
    alone = run(tmp_path / "alone", cases, ranks=1, sharing=1)
    divided = run(tmp_path / "divided", cases, ranks=2, sharing=2)
    for name in ("vocabulary", "long"):
        require_same(alone, divided, name)
    whole, half = (json.loads((f / "long.json").read_text())["saved"] for f in (alone, divided))
    assert 0.45 < half / whole < 0.55
