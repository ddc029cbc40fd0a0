"""GPT-2, whose linear layers are packed as their transpose."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from tasks.weights.adapters.changes import Changes
from tasks.weights.execute.execute import execute
from tasks.weights.families.merging import MergeSettings, plan_merge
from tasks.weights.files.opening import SourceRef, open_sources
from tasks.weights.plan.contracts import model_facts
from tasks.weights.plan.validate import validate
from tests.weights.making import (
    NF4,
    state_of,
)
from tests.weights.quantized.making import TURNED, decode_all, gpt2, pack, same


def test_gpt2_is_decoded_to_its_layout_on_disk(tmp_path: Path) -> None:
    """transformers packs the transpose of the matrices in GPT-2's checkpoints."""
    from transformers import AutoModelForCausalLM

    dequantized = pack(gpt2(tmp_path / "base"), tmp_path / "packed")
    decoded = decode_all(tmp_path / "packed", tmp_path / "out")
    for name, tensor in decoded.items():
        theirs = dequantized[name]
        assert torch.equal(tensor, theirs.t() if name.endswith(TURNED) else theirs), name
    plain = state_of(tmp_path / "base")
    assert {n: t.shape for n, t in decoded.items()} == {n: t.shape for n, t in plain.items()}
    shutil.copy(tmp_path / "base" / "config.json", tmp_path / "out")
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not {*report["missing_keys"], *report["unexpected_keys"]}
    ids = torch.arange(12)[None]
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "packed").dequantize()
    difference = (loaded(ids).logits - packed(ids).logits).float().abs().max()
    assert difference < 0.05  # the same numbers; bf16 sums of a transposed product


def test_gpt2_is_quantized_like_in_training(tmp_path: Path) -> None:
    """QLoRA on a plain base whose layers are `Conv1D`: their transposes are quantized."""
    base = gpt2(tmp_path / "base")
    dequantized = pack(base, tmp_path / "packed")
    facts = model_facts(base)
    quantization = {**NF4, "loaded_dtype": "bfloat16", "base": "dequantized"}
    wanted = MergeSettings(quantization=quantization, quantized=frozenset(facts.quantized))
    unchanged = Changes({}, {}, {}, (), (), {}, ())
    sources = open_sources({"base": SourceRef(base, "base")})
    plan = plan_merge(sources["base"].tensors, facts, unchanged, {}, wanted)
    validate(plan, sources)
    (tmp_path / "out").mkdir()
    execute(plan, sources, tmp_path / "out")
    merged = state_of(tmp_path / "out")
    expected = {n: dequantized[n].t() if n.endswith(TURNED) else dequantized[n] for n in merged}
    assert same(merged, expected) == []
    assert len(same(merged, state_of(base))) == 8
