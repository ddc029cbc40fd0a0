"""`audit.py source= base= adapter= values=true`, and repairs that use a base."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tasks.audit.repair import repair
from tasks.audit.run import audit
from tests.audit.making import (
    adapter_tensors,
    by_code,
    codes,
    edit_json,
    make_adapter,
    make_model,
    tensors,
    write_json,
)

PROGRAM = Path(__file__).resolve().parents[2] / "flows" / "audit.py"
THETA = {"rope_theta": 1e6}


def merge(root: Path, scale: float = 2.0, **changes: Any) -> Path:
    """Merge `make_adapter` into `make_model`: base + scale * B A."""
    arrays, lora = tensors(), adapter_tensors()
    for name in [name for name in lora if name.endswith("lora_A.weight")]:
        key = name.removeprefix("base_model.model.").replace(".lora_A", "")
        arrays[key] = arrays[key] + scale * lora[name.replace("_A", "_B")] @ lora[name]
    return make_model(root, arrays, **changes)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_model(tmp_path / "tiny", **THETA)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, PROGRAM, *words], capture_output=True, text=True)


def test_the_command_proves_a_merge_and_imports_no_torch(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    good = merge(tmp_path / "good", **THETA)
    wrong = merge(tmp_path / "wrong", 4.0, **THETA)
    options = (f"base={base}", f"adapter={adapter}", "values=true")
    done = run(f"source={good}", *options)
    assert (done.returncode, "MERGE_PROVEN" in done.stdout) == (0, True), done.stdout
    assert "4 tensors are the base's plus the adapter's, 17 the base's" in done.stdout
    done = run(f"source={wrong}", *options)
    assert (done.returncode, "MERGE_TWICE" in done.stdout) == (1, True), done.stdout
    program = (
        "import sys; from pathlib import Path; from tasks.audit.run import audit\n"
        f"audit(Path({str(good)!r}), base=Path({str(base)!r}), values=True, "
        f"adapter=Path({str(adapter)!r}))\n"
        "print([name for name in ('torch', 'transformers', 'peft') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout.strip() == "[]", ran.stderr


def test_every_changed_setting_is_named(base: Path, tmp_path: Path) -> None:
    changes = {"rope_theta": 1e4, "rms_norm_eps": 1e-5, "max_position_embeddings": 128}
    report = audit(merge(tmp_path / "it", **changes), base=base)
    reported = {
        (finding.code, finding.tensor, finding.severity.value) for finding in report.findings
    }
    assert {
        ("CONFIG_CHANGED", "rope theta", "error"),
        ("CONFIG_CHANGED", "rms_norm_eps", "error"),
        ("CONFIG_DIFFERS", "max_position_embeddings", "warning"),
    } <= reported


def test_a_missing_theta_is_the_default_of_its_readers(base: Path, tmp_path: Path) -> None:
    report = audit(merge(tmp_path / "it"), base=base)
    assert by_code(report)["CONFIG_CHANGED"] == "error"
    same = audit(merge(tmp_path / "same", rope_theta=1e6), base=base)
    assert "CONFIG_CHANGED" not in by_code(same)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_cache": False, "torch_dtype": "float32", "transformers_version": "4.1"},
        {"_name_or_path": "x/y", "num_labels": 1, "architectures": ["LlamaForCausalLM"]},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"sliding_window": 4096, "use_sliding_window": False, "rope_scaling": None},
    ],
)
def test_irrelevant_settings_give_no_finding(
    base: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    root = merge(tmp_path / "it", **THETA)
    edit_json(root / "config.json", **changes)
    assert not {"CONFIG_CHANGED", "CONFIG_DIFFERS"} & set(codes(root, base=base))


def test_a_wrong_base_is_an_error_by_name_and_by_weights(base: Path, tmp_path: Path) -> None:
    named = make_adapter(tmp_path / "named", base_model_name_or_path="org/tiny-instruct")
    assert codes(named, base=base)["WRONG_BASE"] == "error"
    different = make_model(tmp_path / "other", tensors(7), **THETA)
    placed = make_adapter(tmp_path / "placed", base_model_name_or_path=str(base))
    assert codes(placed, base=different)["WRONG_BASE"] == "error"
    assert "WRONG_BASE" not in codes(placed, base=base)
    packed = make_adapter(tmp_path / "packed", base_model_name_or_path="org/tiny-bnb-4bit")
    assert "WRONG_BASE" not in codes(packed, base=base)


def test_a_repair_copies_settings_of_the_base(base: Path, tmp_path: Path) -> None:
    root = merge(tmp_path / "it", rms_norm_eps=1e-5, rope_theta=1e4)
    settings = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<x>"]}
    write_json(root / "tokenizer_config.json", settings)
    write_json(root / "tokenizer.json", {"model": {"vocab": {}}, "added_tokens": []})
    assert audit(root, base=base).mendable
    done = repair(root, tmp_path / "new", base=base)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-6, 1e6)
    settings = json.loads((tmp_path / "new" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<x>"]
    assert "extra_special_tokens" not in settings
    assert any("as the base has" in line for line in done.done)
    arrays = load_file(tmp_path / "new" / "model.safetensors")
    assert all(
        np.array_equal(arrays[k], v) for k, v in load_file(root / "model.safetensors").items()
    )


def test_rotary_settings_are_written_for_both_readers(tmp_path: Path) -> None:
    from transformers import AutoConfig

    new = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    root = make_model(tmp_path / "it", rope_parameters=new)
    assert codes(root)["ROPE_FORM"] == "warning"
    repair(root, tmp_path / "new")
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["rope_theta"] == 5e5
    other = make_model(
        tmp_path / "other", rope_parameters={**new, "rope_theta": 1e4, "factor": 1.0}
    )
    repair(other, tmp_path / "repaired", base=root)
    reported = codes(tmp_path / "repaired", base=root)
    assert not {"ROPE_FORM", "CONFIG_CHANGED"} & reported.keys()
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert config["rope_parameters"] == new
    read = [
        AutoConfig.from_pretrained(folder).rope_parameters for folder in (root, tmp_path / "new")
    ]
    assert read[0] == read[1]
    assert "ROPE_FORM" not in codes(tmp_path / "new")


@pytest.mark.parametrize(
    ("ours", "theirs"), [({"attn_logit_softcapping": 30.0}, None), ({}, 50.0), ({}, 30.0)]
)
def test_a_cap_of_logits_that_is_not_the_bases(
    ours: dict[str, float], theirs: float | None, tmp_path: Path
) -> None:
    root = make_model(tmp_path / "it", **ours)
    base = make_model(tmp_path / "base", tensors(1), attn_logit_softcapping=theirs)
    assert codes(root, base=base)["CONFIG_CHANGED"] == "error"
    assert "CONFIG_CHANGED" not in codes(root, base=make_model(tmp_path / "same", **ours))


def test_a_tokenizer_class_that_is_not_the_bases(tmp_path: Path) -> None:
    base = make_model(tmp_path / "tiny")
    write_json(base / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizerFast"})
    for root in (make_model(tmp_path / "it", tensors(1)), make_adapter(tmp_path / "adapter")):
        for name, differs in (("PreTrainedTokenizerFast", True), ("LlamaTokenizer", False)):
            write_json(root / "tokenizer_config.json", {"tokenizer_class": name})
            assert ("CONFIG_DIFFERS" in codes(root, base=base)) is differs
