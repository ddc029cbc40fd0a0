"""Wrapper prefixes in key names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.audit.making import adapter_tensors, codes, errors, make_adapter, make_model, tensors


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "pretrained_model.", "_fsdp_wrapped_module."]
)
def test_wrappers_of_a_model(prefix: str, tmp_path: Path) -> None:
    root = make_model(tmp_path / "it", {prefix + key: array for key, array in tensors().items()})
    code = "TRL_RESIDUE" if prefix == "pretrained_model." else "WRAPPER_RESIDUE"
    assert codes(root)[code] == "error"


def test_a_wrapper_inside_a_name(tmp_path: Path) -> None:
    name = "model.layers.0._checkpoint_wrapped_module."
    renamed = {k.replace("model.layers.0.", name): array for k, array in tensors().items()}
    assert errors(codes(make_model(tmp_path / "it", renamed))) == {"WRAPPER_RESIDUE"}


@pytest.mark.parametrize("inner", ["_orig_mod.", "_checkpoint_wrapped_module.", "module."])
def test_wrappers_of_an_adapter_are_one_finding(inner: str, tmp_path: Path) -> None:
    base = make_model(tmp_path / "tiny")
    names = {
        "outside": lambda key: inner + key,
        "layers": lambda key: key.replace("layers.0.", f"layers.0.{inner}"),
        "all": lambda key: key.replace("self_attn.", f"{inner}self_attn.{inner}"),
    }
    for place, how in names.items():
        keys = {how(key): array for key, array in adapter_tensors().items()}
        root = make_adapter(tmp_path / place, keys)
        assert errors(codes(root, base=base)) == {"WRAPPER_RESIDUE"}


def test_a_peft_model_saved_as_a_model(tmp_path: Path) -> None:
    keys = {
        "base_model.model." + k.replace("q_proj.weight", "q_proj.base_layer.weight"): v
        for k, v in tensors().items()
    }
    assert codes(make_model(tmp_path / "it", keys))["PEFT_RESIDUE"] == "error"


def test_lora_that_was_never_merged(tmp_path: Path) -> None:
    lora = {k.removeprefix("base_model.model."): v for k, v in adapter_tensors().items()}
    assert codes(make_model(tmp_path / "it", {**tensors(), **lora}))["PEFT_RESIDUE"] == "error"


def test_the_adapters_name_in_keys(tmp_path: Path) -> None:
    named = {k.replace(".weight", ".default.weight"): v for k, v in adapter_tensors().items()}
    assert codes(make_adapter(tmp_path / "it", named))["ADAPTER_NAME_IN_KEYS"] == "error"


def test_an_adapter_without_its_prefix(tmp_path: Path) -> None:
    bare = {k.removeprefix("base_model.model."): v for k, v in adapter_tensors().items()}
    assert codes(make_adapter(tmp_path / "it", bare))["ADAPTER_PREFIX"] == "error"


def test_clean_names(tmp_path: Path) -> None:
    assert errors(codes(make_adapter(tmp_path / "adapter"))) == set()
    assert errors(codes(make_model(tmp_path / "model"))) == set()
