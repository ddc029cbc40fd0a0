"""Audits with `base=`: adapters and merges that fit or not, and broken bases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.audit.run import audit
from tasks.core.errors import ConfigError, DriftError
from tasks.delivery.base import find_base
from tasks.delivery.source import open_folder, require_base
from tasks.drift.fingerprint import Fingerprint, require_informative
from tests.audit.making import (
    Arrays,
    adapter_tensors,
    codes,
    edit_json,
    errors,
    make_adapter,
    make_model,
    make_shards,
    merge,
    tensors,
    write_json,
)

ALL = adapter_tensors()
LAYER_0 = {key: array for key, array in ALL.items() if "layers.0" in key}
NARROW = {key: array[:, :-2] if "lora_A" in key else array for key, array in ALL.items()}
V_LOST = {key: array for key, array in ALL.items() if "layers.1.self_attn.v" not in key}
TARGETS = [f"model.layers.{layer}.self_attn.{letter}_proj" for layer in (0, 1) for letter in "qv"]
MANY = [*TARGETS, *(f"elsewhere.{number}" for number in range(300))]

ADAPTERS: dict[str, tuple[Arrays, dict[str, Any], set[str]]] = {
    # Tensors, settings, and all errors
    "it fits": (ALL, {}, set()),
    "a layer left out": (LAYER_0, {"layers_to_transform": [0]}, set()),
    "modules left out": (
        LAYER_0, {"exclude_modules": [name.removeprefix("model.") for name in TARGETS[2:]]}, set()
    ),
    "modules of one layer": (LAYER_0, {"target_modules": TARGETS[:2]}, set()),
    "a list of many modules": (ALL, {"target_modules": MANY}, set()),
    "one of many modules lost": (V_LOST, {"target_modules": MANY}, {"ADAPTER_NO_MERGE"}),
    "a pattern": (ALL, {"target_modules": r".*(q|v)_proj"}, set()),
    "tensors beside a pattern": (  # only the plan of the merge knows; peft drops them
        ALL, {"target_modules": r".*layers\.0.*(q|v)_proj"}, {"ADAPTER_NO_MERGE"}
    ),
}  # fmt: skip


def test_adapters_beside_their_base(tmp_path: Path) -> None:
    base = make_model(tmp_path / "tiny")
    reported = {}
    for name, (arrays, settings, _) in ADAPTERS.items():
        adapter = make_adapter(tmp_path / name, arrays, **settings)
        reported[name] = errors(codes(adapter, base=base))
    assert reported == {name: expected for name, (_, _, expected) in ADAPTERS.items()}


BASE_NAMES = {
    # Folder of the base, name in the adapter: severity
    ("models--elsewhere--tiny/snapshots/0a1b", "elsewhere/tiny"): None,
    ("tiny", "elsewhere/tiny"): None,
    ("Tiny", "elsewhere/tiny"): None,
    ("tiny", "org/tiny-bnb-4bit"): "warning",
    ("small", "elsewhere/tiny"): "warning",
    ("tiny-chat", "elsewhere/tiny"): "error",
    ("tiny", "org/tiny-instruct"): "error",
}


def test_the_name_of_a_base(tmp_path: Path) -> None:
    for number, ((folder, name), expected) in enumerate(BASE_NAMES.items()):
        base = make_model(tmp_path / str(number) / folder)
        adapter = make_adapter(tmp_path / f"adapter-{number}", base_model_name_or_path=name)
        reported = codes(adapter, base=base)
        assert reported.get("WRONG_BASE") == expected, (folder, name)


def test_a_base_path_in_the_adapter(tmp_path: Path) -> None:
    """It needs no option, and another base is known by its weights."""
    base = make_model(tmp_path / "tiny")
    placed = make_adapter(tmp_path / "placed", base_model_name_or_path=str(base))
    assert "WRONG_BASE" not in codes(placed, base=base)
    assert codes(placed, base=make_model(tmp_path / "other", tensors(7)))["WRONG_BASE"] == "error"
    missing = {key.replace("layers.1", "layers.9"): array for key, array in ALL.items()}
    placed = make_adapter(tmp_path / "missing", missing, base_model_name_or_path=str(base))
    assert "ADAPTER_NO_MERGE" in errors(codes(placed))


def test_a_base_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    adapter = make_adapter(tmp_path / "it")
    for other in (tmp_path / "empty", make_adapter(tmp_path / "other")):
        for source in (adapter, make_model(tmp_path / "merged")):
            assert codes(source, base=other)["WRONG_BASE"] == "error"


def test_an_unreadable_base_gives_no_errors_of_the_adapter(tmp_path: Path) -> None:
    root = make_model(tmp_path / "tiny", architectures="?", vocab_size={})
    (root / "model.safetensors").write_bytes(b"x" * 100)
    assert not errors(codes(make_adapter(tmp_path / "it"), base=root))


def test_a_base_in_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "hub" / "models--x--y"
    snapshot = make_shards(repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    narrow = make_adapter(tmp_path / "it", NARROW, base_model_name_or_path="x/y")
    report = audit(narrow)
    assert Path(report.base) == snapshot == find_base(open_folder(narrow), None, tmp_path)
    assert {finding.code for finding in report.errors} == {"ADAPTER_NO_MERGE"}
    elsewhere = make_adapter(tmp_path / "other", NARROW, base_model_name_or_path="x/z")
    assert not audit(elsewhere).base
    (snapshot / "model-00002-of-00003.safetensors").unlink()
    report = audit(narrow)  # an interrupted download is no fault of the adapter
    assert report.of_base is not None
    assert not report.errors
    assert {finding.code for finding in report.of_base.errors} == {"INDEX_WRONG"}
    assert not report.ok
    assert f"source={snapshot}" in report.text()


def zeros(name: str) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {key: array * (name not in key) for key, array in arrays.items()}


def bare(arrays: Arrays) -> Arrays:
    return {k: a.astype(np.int8) if k.endswith("proj.weight") else a for k, a in arrays.items()}


def test_values_of_a_base(tmp_path: Path) -> None:
    require_base(make_model(tmp_path / "fine"))
    added = zeros("layers.1.self_attn.o_proj")(zeros("layers.1.mlp.down_proj")(tensors()))
    require_base(make_model(tmp_path / "llama pro", added))
    require_base(tmp_path / "llama pro", values=False)
    faults: list[tuple[Callable[[Arrays], Arrays], str]] = [
        (zeros("lm_head"), "CONSTANT_ROWS"),
        (zeros("layers.1.mlp.down_proj"), "CONSTANT_ROWS"),
        (lambda arrays: {k: np.ones_like(a) for k, a in arrays.items()}, "CONSTANT_ROWS"),
        (lambda arrays: {k: a * np.nan for k, a in arrays.items()}, "NOT_FINITE"),
        (bare, "QUANT_CONFIG"),
    ]
    for number, (change, code) in enumerate(faults):
        folder = make_model(tmp_path / str(number), change(tensors()))
        # Not finite ones are left to the merge, which reads every value.
        for values in (None, False) if code != "NOT_FINITE" else (None,):
            with pytest.raises(ConfigError, match=code):
                require_base(folder, values=values)


def test_a_training_that_moved_norms_is_no_error(tmp_path: Path) -> None:
    base, rng = make_model(tmp_path / "base"), np.random.default_rng(1)
    trained = {
        k: a + 0.1 * rng.standard_normal(a.shape, np.float32) if a.ndim > 1 else 9 * a
        for k, a in tensors().items()
    }
    assert errors(codes(make_model(tmp_path / "trained", trained), base=base)) == set()
    raw = {k: a * (300 if "q_proj" in k else 1) for k, a in tensors().items()}
    assert errors(codes(make_model(tmp_path / "raw", raw), base=base)) == {"NORM_DIFFERS"}


def test_a_reference_depends_on_its_context() -> None:
    rng = np.random.default_rng(0)
    probes = tuple(tuple(rng.integers(0, 4, 12).tolist()) for _ in range(4))
    count, size = 44, 30

    def fingerprint(rows: np.ndarray) -> Fingerprint:
        exact = (rows - np.log(np.exp(rows).sum(1, keepdims=True))).astype(np.float32)
        ids = np.tile(np.arange(size, dtype=np.int32), (count, 1))
        return Fingerprint(probes, ids, exact, exact.argmax(1).astype(np.int32), "transformers")

    by_token = rng.standard_normal((4, size))
    last = [token for probe in probes for token in probe[:-1]]
    require_informative(fingerprint(0.01 * rng.standard_normal((count, size))), "random")
    for broken in (np.zeros((count, size)), np.tile(by_token[0], (count, 1)), by_token[last]):
        with pytest.raises(DriftError, match="broken"):
            require_informative(fingerprint(broken), "broken")


def test_every_changed_setting_is_named(tmp_path: Path) -> None:
    base = make_model(tmp_path / "tiny", rope_theta=1e6, attn_logit_softcapping=50.0)
    report = audit(merge(tmp_path / "it", rms_norm_eps=1e-5), base=base)  # theta is left out
    assert {(each.code, each.tensor, each.severity.value) for each in report.findings} >= {
        ("CONFIG_CHANGED", "rope theta", "error"),
        ("CONFIG_CHANGED", "rms_norm_eps", "error"),
        ("CONFIG_CHANGED", "attn_logit_softcapping", "error"),
    }


def test_settings_that_change_nothing_give_no_finding(tmp_path: Path) -> None:
    base = make_model(tmp_path / "tiny", rope_theta=1e6)
    for number, changes in enumerate((
        {"use_cache": False, "torch_dtype": "float32", "transformers_version": "4.1"},
        {"_name_or_path": "x/y", "num_labels": 1, "architectures": ["LlamaForCausalLM"]},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"sliding_window": 4096, "use_sliding_window": False, "rope_scaling": None}
    )):  # fmt: skip
        root = merge(tmp_path / str(number), rope_theta=1e6)
        edit_json(root / "config.json", **changes)
        assert "CONFIG_CHANGED" not in codes(root, base=base), changes


def test_a_tokenizer_class_that_is_not_the_bases(tmp_path: Path) -> None:
    base = make_model(tmp_path / "tiny")
    write_json(base / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizerFast"})
    for root in (make_model(tmp_path / "it", tensors(1)), make_adapter(tmp_path / "adapter")):
        for name, differs in (("PreTrainedTokenizerFast", True), ("LlamaTokenizer", False)):
            write_json(root / "tokenizer_config.json", {"tokenizer_class": name})
            assert ("CONFIG_CHANGED" in codes(root, base=base)) is differs
