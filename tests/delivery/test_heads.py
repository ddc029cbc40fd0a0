"""Reward models and value heads are the same after delivery; repaired errors are not in OUT."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.audit.run import audit
from tests.audit.making import edit_json
from tests.delivery.conftest import Done
from tests.delivery.making import TARGETS, base_of, differing
from tests.tiny import save_tokenizer
from tests.weights.heads import causal, classifier, head_tensors, rewards, save_trl, scores
from tests.weights.making import near, quiet, save, state_of, train

Run = Callable[..., Done]
SAME = "convert.dtype=float32"
BASE = "merge.base=original"


def without_head(out: Path) -> bool:
    """Return True if no file of OUT has a value head, on which vLLM fails."""
    beside = [path.name for path in out.iterdir() if "head" in path.name]
    return not beside and not [name for name in state_of(out) if "v_head" in name]


def reward_adapter(tmp_path: Path, family: str, heads: int = 4) -> tuple[Path, Path, Any]:
    """Make a base, a reward adapter as OpenRLHF saves it, and the trained model.

    Tokenizer and config.json, with mean 0.5 and standard deviation 2, are beside the adapter.
    """
    from peft import LoraConfig

    base = base_of(tmp_path / "base", family, heads)
    config = LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["score"])
    wrapped = train(classifier(base), config)
    adapter = save(wrapped, tmp_path / "adapter")
    save_tokenizer(adapter)
    (adapter / "config.json").write_text((base / "config.json").read_text())
    edit_json(adapter / "config.json", mean=0.5, std=2.0, value_head_prefix="score")
    return base, adapter, wrapped


def test_a_reward_adapter_and_its_base(here: Run, tmp_path: Path) -> None:
    base, adapter, wrapped = reward_adapter(tmp_path, "llama")
    done = here(f"source={adapter}", f"base={base}", BASE, SAME)
    assert done.stages == ["audit", "merge", "convert"]
    with quiet():
        merged = wrapped.merge_and_unload()
    assert differing(state_of(tmp_path / "out"), merged.state_dict()) == []
    raw = rewards(merged, merged.score.weight.detach())
    assert near(scores(tmp_path / "out"), (raw - 0.5) / 2.0)


def test_an_adapter_with_a_value_head_beside_it(here: Run, tmp_path: Path) -> None:
    """LLaMA-Factory's `value_head.bin`."""
    from peft import LoraConfig

    base = base_of(tmp_path / "base")
    wrapped = train(causal("qwen"), LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"))
    adapter = save(wrapped, tmp_path / "adapter")
    torch.save(head_tensors(), adapter / "value_head.bin")
    done = here(f"source={adapter}", f"base={base}", BASE, SAME)
    assert done.stages == ["audit", "merge", "convert"]
    with quiet():
        merged = wrapped.merge_and_unload().state_dict()
    assert differing(state_of(tmp_path / "out"), merged) == []
    assert without_head(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("engine", "dtype", "limit"),
    [("transformers", "float32", 1e-5), ("vllm", "bfloat16", 0.03)],
)
def test_an_engine_scores_an_unmerged_adapter(deliver, engine, dtype, limit, tmp_path) -> None:
    base, adapter, _ = reward_adapter(tmp_path, "qwen", heads=1)  # of 32, as vLLM needs on a CPU
    words = [f"source={adapter}", f"base={base}", BASE, f"convert.dtype={dtype}", "smoke.probes=8"]
    done = deliver(*words, engine=engine, timeout=570)
    assert done.stages == ["audit", "reference", "merge", "convert", "smoke_eval"]
    report = json.loads(Path(done.summary["stages"][-1]["artifact"], "report.json").read_text())
    assert report["engine"] == engine
    assert report["mean_difference"] < limit, report


def _eos_of_the_base(folder: Path) -> None:
    """Write another EOS id into both configurations than the tokenizer's (LLaMA-Factory #9338)."""
    save_trl(folder, "llama")
    stored = load_file(folder / "model.safetensors")
    model = {name: tensor for name, tensor in stored.items() if not name.startswith("v_head")}
    save_file(model, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        edit_json(folder / name, eos_token_id=7)


def errors(folder: Path) -> set[str]:
    return {finding.code for finding in audit(folder).findings if finding.severity == "error"}


def test_handled_errors_are_not_in_out(here: Run, tmp_path: Path) -> None:
    codes = {"EOS_DISAGREES"}
    _eos_of_the_base(tmp_path / "source")
    assert errors(tmp_path / "source") == codes
    done = here(f"source={tmp_path / 'source'}")
    handled = {finding["code"] for finding in done.summary["findings"] if finding["handled"]}
    assert handled == codes
    assert errors(tmp_path / "out") == set()
    (stage,) = (entry for entry in done.summary["stages"] if entry["name"] == "audit")
    kept = json.loads((Path(stage["artifact"]) / "findings.json").read_text())
    assert kept["findings"] == done.summary["findings"]
    manifest = json.loads((Path(stage["artifact"]) / "manifest.json").read_text())
    assert manifest["notes"]["metrics"]["audit/errors"] >= len(codes)
