"""Adapters against their bases: faults that names and sizes show, and harmless differences."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.audit.making import (
    adapter_tensors,
    codes,
    config,
    errors,
    make_adapter,
    make_model,
    tensors,
    write_json,
)

FINE = {"ADAPTER_IS_NO_MODEL": "info"}


def base(root: Path, *, prefix: str = "", biases: bool = False) -> Path:
    """Make the tiny model, possibly inside another one, under the name that adapters give it."""
    arrays = {prefix + key: array for key, array in tensors().items()}
    if biases:
        arrays |= {
            key.replace(".weight", ".bias"): array[:, 0].copy()
            for key, array in arrays.items()
            if "_proj" in key
        }
    return make_model(root / "tiny", arrays)


def test_an_adapter_that_fits_its_base(tmp_path: Path) -> None:
    assert codes(make_adapter(tmp_path / "it"), base=base(tmp_path)) == FINE


@pytest.mark.parametrize("biases", [False, True])
def test_a_base_within_another_model(tmp_path: Path, *, biases: bool) -> None:
    """Names in memory differ from those on disk by the prefix of the layers."""
    outer = base(tmp_path, prefix="language_model.", biases=biases)
    assert not errors(codes(make_adapter(tmp_path / "it"), base=outer))
    narrow = {
        key: array[:, :-2] if "lora_A" in key else array for key, array in adapter_tensors().items()
    }
    reported = codes(make_adapter(tmp_path / "narrow", narrow), base=outer)
    assert errors(reported) == {"ADAPTER_SHAPE"}


def test_coverage_of_selected_layers(tmp_path: Path) -> None:
    arrays = {key: array for key, array in adapter_tensors().items() if "layers.0" in key}
    whole = base(tmp_path)
    assert errors(codes(make_adapter(tmp_path / "a", arrays), base=whole)) == {"ADAPTER_COVERAGE"}
    for settings in (
        {"layers_to_transform": [0]},
        {"exclude_modules": ["layers.1.self_attn.q_proj", "layers.1.self_attn.v_proj"]},
        {"target_modules": [f"model.layers.0.self_attn.{letter}_proj" for letter in "qv"]},
    ):
        root = make_adapter(tmp_path / next(iter(settings)), arrays, **settings)
        assert not errors(codes(root, base=whole)), settings


def test_targets_listed_module_by_module(tmp_path: Path) -> None:
    named = [f"model.layers.{layer}.self_attn.{letter}_proj" for layer in (0, 1) for letter in "qv"]
    many = [*named, *(f"elsewhere.{number}" for number in range(300))]
    whole = base(tmp_path)
    arrays = adapter_tensors()
    root = make_adapter(tmp_path / "a", arrays, target_modules=many)
    assert not errors(codes(root, base=whole))
    for key in [key for key in arrays if "layers.1.self_attn.v" in key]:
        del arrays[key]
    reported = codes(make_adapter(tmp_path / "b", arrays, target_modules=many), base=whole)
    assert errors(reported) == {"ADAPTER_COVERAGE"}


def test_tensors_beside_a_target_pattern(tmp_path: Path) -> None:
    """Which modules a pattern means, only the plan of the merge knows; peft drops the others."""
    root = make_adapter(tmp_path / "all", target_modules=r".*(q|v)_proj")
    assert codes(root, base=base(tmp_path)) == FINE
    root = make_adapter(tmp_path / "it", target_modules=r".*layers\.0.*(q|v)_proj")
    assert codes(root, base=tmp_path / "tiny") == {**FINE, "ADAPTER_NO_MERGE": "error"}


@pytest.mark.parametrize(
    "place",
    ["models--elsewhere--tiny/snapshots/0a1b", "tiny", "Tiny"],
    ids=["hub", "plain", "case"],
)
def test_a_base_by_its_name(place: str, tmp_path: Path) -> None:
    root = make_model(tmp_path / place)
    assert "BASE_NAME" not in codes(make_adapter(tmp_path / "it"), base=root)


def test_a_base_of_another_name(tmp_path: Path) -> None:
    root = make_model(tmp_path / "small")
    assert codes(make_adapter(tmp_path / "it"), base=root)["BASE_NAME"] == "warning"
    reported = codes(make_adapter(tmp_path / "of"), base=make_model(tmp_path / "tiny-chat"))
    assert (reported["WRONG_BASE"], "BASE_NAME" in reported) == ("error", False)


def test_a_base_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    adapter = make_adapter(tmp_path / "it")
    for other in (tmp_path / "empty", make_adapter(tmp_path / "other")):
        for source in (adapter, make_model(tmp_path / "merged")):
            assert codes(source, base=other)["WRONG_BASE"] == "error"


def test_a_local_base_path_needs_no_option(tmp_path: Path) -> None:
    """A local path in base_model_name_or_path is used without the option base."""
    root = make_model(tmp_path / "gpt", tensors(), model_type="other")
    arrays = {
        key.replace("layers.1", "layers.9"): array for key, array in adapter_tensors().items()
    }
    reported = codes(make_adapter(tmp_path / "it", arrays, base_model_name_or_path=str(root)))
    assert "ADAPTER_NO_MODULE" in errors(reported)


def test_an_unreadable_base_gives_no_errors(tmp_path: Path) -> None:
    root = base(tmp_path)
    (root / "model.safetensors").write_bytes(b"x" * 100)
    assert not errors(codes(make_adapter(tmp_path / "it"), base=root))
    write_json(root / "config.json", config(architectures="?", vocab_size={}))
    assert not errors(codes(make_adapter(tmp_path / "it"), base=root))
