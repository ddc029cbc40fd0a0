"""Adapters that are damaged or do not fit the model: every finding names its tensor or setting."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tasks.core.errors import ArtifactError, ContractError, PlumblineError
from tasks.weights.lora import changes, read_adapter, require_values
from tasks.weights.model import Model, live_model
from tests.tiny import random_model
from tests.weights.adapters.making import Tensors, altered, save, train
from tests.weights.families.making import FAMILIES, FUSED, merge
from tests.weights.making import state_of

Edit = Callable[[Tensors], Any]

A0, B0 = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight" for half in "AB")


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(FAMILIES["llama"].config()).float()


@pytest.fixture(scope="module")
def live(model: Any) -> Model:
    return live_model(model)


def _save(model: Any, folder: Path, **settings: Any) -> Path:
    from peft import LoraConfig

    return save(train(model, LoraConfig(r=4, lora_alpha=8, **settings)), folder)


@pytest.fixture(scope="module")
def good(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "adapter"
    return _save(model, folder, target_modules=["q_proj", "down_proj"])


SETTINGS: list[dict[str, Any]] = [
    {"target_modules": ["nothing"]},
    {"target_modules": ["q_proj", "o_proj", "down_proj"]},
    {"target_modules": ["q_proj"]},
    {"target_modules": ["q_proj", "down_proj", "norm"]},
    {"r": 8},
    {"rank_pattern": {"q_proj": 2}},
    {"lora_alpha": 0},
    {"use_dora": True},
    {"lora_bias": True},
    {"modules_to_save": ["lm_head"]},
    {"trainable_token_indices": [5]},
    {"trainable_token_indices": {"wte": [1]}},
    {"trainable_token_indices": {"model.norm": [1]}},  # no embedding
    {"target_parameters": ["o_proj.weight"]},
    {"use_dora": True, "target_parameters": ["o_proj.weight"]},
    {"target_parameters": ["q_proj.weight"]},  # changed twice
    {"modules_to_save": ["proj"]},
]


def test_settings_that_do_not_fit_the_tensors_are_refused(good, live, tmp_path: Path) -> None:
    assert changes(read_adapter(good), live).findings == []
    for config in SETTINGS:
        assert changes(
            read_adapter(altered(good, tmp_path / "bad", config=config)), live
        ).findings, config
    name = "model.layers.0.self_attn.q_proj.weight"
    larger = replace(live, parameters={**live.parameters, name: (48, 32)})
    assert any(B0 in line for line in changes(read_adapter(good), larger).findings)
    several = altered(good, tmp_path / "bad", config={"lora_alpha": 0, "init_lora_weights": "x"})
    assert len(changes(read_adapter(several), live).findings) == 2


def _zeroed(half: str) -> Edit:
    """Zero one factor of every pair, with the sign of zero on some elements."""
    return lambda t: [t[key].neg_().mul_(0) for key in t if half in key]


def test_values_that_no_training_leaves(good: Path, tmp_path: Path) -> None:
    damages: list[tuple[Edit, str]] = [
        (_zeroed("lora_A"), "zero"),
        (_zeroed("lora_B"), "zero"),
        (lambda t: t[A0][0].fill_(math.nan), "32 elements"),
        (lambda t: t[B0][1, 1].fill_(-math.inf), "1 elements"),
    ]
    for edit, thing in damages:
        with pytest.raises(ContractError, match=thing):
            require_values(read_adapter(altered(good, tmp_path / "bad", edit)))
    for key in (A0, B0):  # a module that saw no data is no fault
        fine = altered(good, tmp_path / "fine", lambda tensors, key=key: tensors[key].zero_())
        require_values(read_adapter(fine))


def test_copies_of_a_tied_tensor_have_to_agree(tmp_path: Path) -> None:
    tied = random_model(FAMILIES["qwen2"].config(tie_word_embeddings=True)).float()
    folder = tmp_path / "good"
    wrapped = _save(tied, folder, target_modules=["q_proj"])
    path, key = wrapped / "adapter_model.safetensors", "base_model.model.lm_head.weight"
    table = tied.get_input_embeddings().weight.detach().clone()
    stored = {key: table, key.replace("lm_head", "model.embed_tokens"): table.clone()}
    save_file({**load_file(path), **stored}, path)
    for added in (0.0, 1.0):
        changed = altered(folder, tmp_path / "bad", lambda t, added=added: t[key].add_(added))
        total = changes(read_adapter(changed), live_model(tied))
        assert f"adapter:{key}" in total.dropped
        if added:
            with pytest.raises(ContractError, match="lm_head"):
                require_values(read_adapter(changed), total.copies)
        else:
            require_values(read_adapter(changed), total.copies)


def test_a_square_parameter_needs_the_version(tmp_path: Path) -> None:
    """Before peft 0.19.1 its factors lay the other way round."""
    model = random_model(FAMILIES["qwen3_moe"].config(moe_intermediate_size=16)).float()
    facts, settings = live_model(model), {"target_parameters": list(FUSED)}
    good = _save(model, tmp_path / "good", target_modules=["q_proj"], **settings)
    assert changes(read_adapter(good), facts).findings == []
    for version in ("0.18.1", ""):
        old = altered(good, tmp_path / "old", config={"peft_version": version})
        findings = changes(read_adapter(old), facts).findings
        name = "model.layers.{}.mlp.experts.gate_up_proj"
        assert [line.partition(":")[0] for line in findings] == [name.format(n) for n in (0, 1)]
        assert all('"peft_version": "0.19.1"' in line for line in findings)


def test_folders_without_one_adapter(good: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError):
        read_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"adapter_model\.safetensors"):
        read_adapter(tmp_path)
    both = altered(good, tmp_path / "both")
    torch.save({}, both / "adapter_model.bin")
    with pytest.raises(ArtifactError, match=r"adapter_model\.bin"):
        read_adapter(both)


MANY_THINGS = {
    "target_modules": ["q_proj", "up_proj"],
    "use_dora": True,
    "bias": "all",
    "modules_to_save": ["model.norm"],
    "trainable_token_indices": [3, 9],
}
EXPERTS = {"target_modules": ["o_proj"], "target_parameters": ["gate_up_proj", "down_proj"]}
RICH: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", MANY_THINGS),
    ("qwen2", {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    ("gpt2", {"target_modules": ["c_attn", "wte"]}),
    ("mixtral", EXPERTS),
]
MUTATIONS: dict[str, Callable[[Tensors, str], object]] = {
    "drop": lambda t, key: t.pop(key),
    "shape": lambda t, key: t.update({key: t[key][:-1]}),
    "transpose": lambda t, key: t.update({key: t[key].transpose(0, -1)}),
    "zero": lambda t, key: t.update({key: t[key] * (".lora_magnitude" not in key)}),
    "nan": lambda t, key: t.update({key: t[key] * math.nan}),
    "rename": lambda t, key: t.update({key.replace("self_attn", "attn"): t.pop(key)}),
    "swap": lambda t, key: t.update({key.replace("lora_A", "lora_B"): t.pop(key)}),
    "dtype": lambda t, key: t.update({key: t[key].to(torch.int32)}),
    "again": lambda t, key: t.update({key.replace("base_model.model.", ""): t[key].clone()}),
    "empty": lambda t, key: t.update({key: torch.zeros(0)}),
    "named": lambda t, key: t.update({key.replace("lora_A.", "lora_A.default."): t.pop(key)}),
    "order": lambda t, key: t.update({key: t.pop(key)}),
}


@pytest.mark.parametrize(("family", "options"), RICH)
def test_a_mutated_adapter_is_an_error_or_the_same_merge(family, options, tmp_path: Path) -> None:
    base, bad, out = tmp_path / "base", tmp_path / "bad", tmp_path / "out"
    model = random_model(FAMILIES[family].config(tie_word_embeddings=family == "qwen2"))
    model.save_pretrained(base)
    good = _save(model.float(), tmp_path / "good", **options)
    merge(base, good, tmp_path / "expected")
    expected, keys = state_of(tmp_path / "expected"), sorted(state_of(good, "adapter_model"))

    @settings(deadline=None, max_examples=15)
    @given(key=st.sampled_from(keys), kind=st.sampled_from(sorted(MUTATIONS)))
    def check(key: str, kind: str) -> None:
        altered(good, bad, lambda tensors: MUTATIONS[kind](tensors, key))
        shutil.rmtree(out, ignore_errors=True)
        try:
            merge(base, bad, out)
        except PlumblineError:
            return
        merged = state_of(out)
        assert all(torch.equal(merged[name], expected[name]) for name in expected), kind

    check()
