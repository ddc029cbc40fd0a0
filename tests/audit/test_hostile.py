"""Malicious folders: a finding or an error, in bounded time, and never a crash."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tasks.audit import folder as folders
from tasks.audit.run import audit
from tasks.core.errors import ArtifactError
from tasks.weights.files.documents import read_manifest
from tests.audit.making import codes, edit_json, make_adapter, make_model, make_shards, write_json

VALUES: tuple[Any, ...] = (
    None, 3, -1, 1 << 70, 1.5, float("inf"), True, "", "x", "\ud800", "a" * 5000, [], [[]], [3],
    ["x"], {}, {"a": 1}, {"0": {}}, [{"a": []}],
)  # fmt: skip
TOKENIZER = {
    "version": "1.0", "added_tokens": [{"id": 2, "content": "<eos>", "special": True}],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
}  # fmt: skip
SETTINGS = {
    "eos_token": "<eos>", "chat_template": "{% for m in messages %}{{ m }}{% endfor %}",
    "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64, "auto_map": {},
}  # fmt: skip


def fuzz(root: Path, name: str, base: Path | None = None) -> None:
    """Give every key of a JSON file a few values of wrong types."""
    before = (root / name).read_text()
    document = json.loads(before)
    for key in [*document]:
        for value in random.Random(key).sample(VALUES, 6):
            write_json(root / name, {**document, key: value})
            report = audit(root, base=base)
            failed = [finding for finding in report.findings if finding.code == "CANNOT_JUDGE"]
            assert not failed, f"{name}: {key}={str(value)[:60]!r}: {failed[0].found}"
            report.text().encode("utf-8", "replace")
            json.dumps(report.as_json())
    (root / name).write_text(before)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    root = make_shards(tmp_path / "it", 2, num_experts=4, auto_map={})
    write_json(root / "tokenizer.json", TOKENIZER)
    write_json(root / "tokenizer_config.json", SETTINGS)
    write_json(root / "generation_config.json", {"eos_token_id": 2, "pad_token_id": 0})
    return root


@pytest.mark.parametrize(
    "name",
    [
        "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json",
        "model.safetensors.index.json",
    ],
)  # fmt: skip
def test_json_values_of_wrong_types(name: str, model: Path) -> None:
    fuzz(model, name)


def test_an_adapters_configuration(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "use_dora": False, "use_rslora": False, "modules_to_save": None, "rank_pattern": {},
        "alpha_pattern": {}, "layers_to_transform": None, "trainable_token_indices": None,
        "target_parameters": None, "exclude_modules": None, "init_lora_weights": True,
        "fan_in_fan_out": False, "inference_mode": True, "auto_mapping": None, "lora_bias": False,
    }  # fmt: skip
    base = make_model(tmp_path / "base")
    root = make_adapter(tmp_path / "it", **settings)
    fuzz(root, "adapter_config.json", base)


def test_more_files_than_are_listed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MAX_ENTRIES", 3)
    assert codes(model)["LISTING_CUT"] == "error"


def test_endless_folders(tmp_path: Path) -> None:
    root = make_model(tmp_path / "it")
    deep = root
    for _ in range(60):
        deep = deep / "d"
        deep.mkdir()
    (root / "loop").symlink_to("loop")
    (root / "up").symlink_to("..")
    findings = audit(root).findings
    assert sorted(f.file for f in findings if f.code == "ODD_ENTRY") == ["d/d/d/d/d/d", "loop"]
    assert [f.file for f in findings if f.code == "LINK_OUTSIDE"] == ["up"]


def test_file_names_that_are_not_utf8(tmp_path: Path) -> None:
    root = make_model(tmp_path / "it")
    (root / os.fsdecode(b"\xff\xfe.safetensors")).write_bytes(b"x" * 20)
    report = audit(root)
    assert report.text().encode()
    assert json.dumps(report.as_json()).encode()


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_without_bounds(tmp_path: Path, name: str) -> None:
    root, bomb = make_model(tmp_path / "it"), "{{ 'a' * 3000000000 }}"
    write_json(root / "tokenizer.json", TOKENIZER)
    settings = {key: value for key, value in SETTINGS.items() if key != "chat_template"}
    if name == "chat_template.jinja":
        (root / name).write_text(bomb)
    else:
        settings["chat_template"] = bomb
    write_json(root / "tokenizer_config.json", settings)
    findings = [f for f in audit(root).findings if f.code == "TEMPLATE_UNBOUNDED"]
    assert [f.file for f in findings] == [name]
    assert "1 GiB" in findings[0].found


def test_escape_sequences(model: Path) -> None:
    escapes = "\x1b[2J\x1b]0;owned\x07\u202e\x9b31m"
    (model / f"adapter_model{escapes}.safetensors").write_bytes(b"x" * 20)
    edit_json(model / "config.json", model_type=escapes, architectures=[escapes], dtype=escapes)
    edit_json(model / "tokenizer_config.json", eos_token=escapes, auto_map={"a": escapes})
    report = audit(model)
    for text in (report.text(), report.markdown(), report.what):
        assert {char for char in text if not char.isprintable()} <= {"\n"}


def test_a_manifest_with_paths_outside_the_folder(tmp_path: Path) -> None:
    root = make_model(tmp_path / "it")
    for files in (
        {"../../etc/passwd": {"size": 1, "sha256": "0"}}, {"a": 3}, {"a": None}, {"a": {"size": 1}},
        {"a": {"size": None, "blake3": "0"}}, [], 3,
    ):  # fmt: skip
        manifest = {"kind": "weights", "digest": "", "tensors": {}, "inputs": {}, "notes": {}}
        write_json(root / "manifest.json", {**manifest, "files": files})
        report = audit(root, values=True)
        assert not report.ok


@pytest.mark.parametrize(
    "tensors", [{"a": None}, {"model.safetensors": {"x": None}}, {"a": {"x": {"blake3": 3}}}, [], 3]
)
def test_a_damaged_manifest_is_a_finding(tensors: Any, tmp_path: Path) -> None:
    root = make_model(tmp_path / "it")
    manifest = {"kind": "weights", "digest": "", "files": {}, "inputs": {}, "notes": {}}
    write_json(root / "manifest.json", {**manifest, "tensors": tensors})
    severities = codes(root, values=True)
    assert severities["MANIFEST_DIFFERS"] == "error"
    assert "CANNOT_JUDGE" not in severities
    with pytest.raises(ArtifactError, match="not a manifest"):
        read_manifest(root)


@pytest.mark.parametrize("missing", ["kind", "digest", "files"])
def test_a_manifest_without_one_of_its_keys_is_a_finding(missing: str, tmp_path: Path) -> None:
    root = make_model(tmp_path / "it")
    keys = ("kind", "digest", "tensors", "files", "inputs", "notes")
    write_json(root / "manifest.json", {key: {} for key in keys if key != missing})
    assert codes(root, values=True)["MANIFEST_DIFFERS"] == "error"
    with pytest.raises(ArtifactError, match="not a manifest"):
        read_manifest(root)
    write_json(root / "manifest.json", {"name": "an app", "files": []})  # another tool's
    assert read_manifest(root) == {}
