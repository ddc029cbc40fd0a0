"""OpenRLHF's reward models: delivered if they can be served, otherwise refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.delivery.conftest import Done
from tests.delivery.test_heads import SAME, base_of, same
from tests.weights.adapters.making import quiet, save, train
from tests.weights.heads.making import change_config, rewards, save_openrlhf, scores
from tests.weights.heads.test_merging import TARGETS, classifier
from tests.weights.making import save_tokenizer, state_of
from tests.weights.rounding import near

Run = Callable[..., Done]


def refused(here: Run, tmp_path: Path, *arguments: str) -> str:
    """Run deliver, check that it refused before anything was written, and return the message."""
    before = {path.name for path in tmp_path.iterdir()}
    done = here(*arguments, f"out={tmp_path / 'out'}")
    assert done.code == 2, done.output
    assert {path.name for path in tmp_path.iterdir()} == before
    return done.output


def test_a_full_one_is_served_as_a_classifier(here: Run, tmp_path: Path) -> None:
    model = save_openrlhf(tmp_path / "rm", "llama")
    done = here(f"source={tmp_path / 'rm'}", f"out={tmp_path / 'out'}", SAME)
    assert done.code == 0, done.output
    assert "an OpenRLHF reward model" in done.output
    assert done.stages == ["audit", "convert"]
    with torch.no_grad():
        assert near(scores(tmp_path / "out"), rewards(model, model.score.weight))
    findings = done.summary["findings"]
    handled = {item["code"]: item["handled"] for item in findings if item["handled"]}
    assert set(handled) == {"HEAD_LABELS", "VLLM_ARCHITECTURE"}
    for code, why in handled.items():
        assert f"  {code} config.json" in done.output
        assert why in done.output


def test_an_adapter_with_its_head_saved_whole(here: Run, tmp_path: Path) -> None:
    from peft import LoraConfig

    base = base_of(tmp_path / "base", "llama")
    settings = LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["score"])
    wrapped = train(classifier("llama", base), settings)
    adapter = save(wrapped, tmp_path / "adapter")
    save_tokenizer(adapter)
    (adapter / "config.json").write_text((base / "config.json").read_text())
    change_config(adapter, value_head_prefix="score", mean=0.5, std=2.0)
    done = here(
        f"source={adapter}", f"base={base}", "merge.base=original", f"out={tmp_path / 'out'}", SAME
    )
    assert done.code == 0, done.output
    with quiet():
        merged = wrapped.merge_and_unload()
    assert same(state_of(tmp_path / "out"), merged.state_dict())


def test_an_adapter_whose_head_was_a_lora_layer_is_refused(here: Run, tmp_path: Path) -> None:
    """With `--lora_target_modules all-linear` the random head becomes a LoRA layer and is lost."""
    from peft import LoraConfig

    base = base_of(tmp_path / "base")
    wrapped = train(classifier("qwen", base), LoraConfig(r=4, target_modules="all-linear"))
    adapter = save(wrapped, tmp_path / "adapter")
    output = refused(here, tmp_path, f"source={adapter}", f"base={base}", "merge.base=original")
    assert (
        "HEAD_BASE_LOST adapter_model.safetensors: base_model.model.score.lora_A.weight" in output
    )
    assert "fix: train again with the head in modules_to_save" in output


def test_a_full_one_without_its_head_is_refused(here: Run, tmp_path: Path) -> None:
    save_openrlhf(tmp_path / "rm", "qwen")
    path = tmp_path / "rm" / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name != "score.weight"}
    save_file(tensors, path, metadata={"format": "pt"})
    output = refused(here, tmp_path, f"source={tmp_path / 'rm'}")
    assert "HEAD_MISSING" in output
    assert "a head that was never saved cannot be recovered" in output
    assert "VLLM_ARCHITECTURE" not in output  # of which a delivery makes another class


def test_an_adapter_that_was_never_gathered_is_refused(
    here: Run, adapter: Path, base: Path, tmp_path: Path
) -> None:
    source = tmp_path / "ckpt"
    source.mkdir()
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({name: torch.empty(0) for name in tensors}, source / "adapter_model.safetensors")
    (source / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    output = refused(here, tmp_path, f"source={source}", f"base={base}", "merge.base=original")
    assert "EMPTY_TENSOR adapter_model.safetensors" in output
    assert f"{len(tensors)} of {len(tensors)} tensors empty, shape [0]" in output
    assert f"-> python flows/audit.py source={source} tells the rest" in output
