"""A record of the training, shards of ranks beside or in place of a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tasks.audit.repair import repair
from tasks.audit.run import audit
from tasks.core.errors import ContractError
from tasks.drift.fingerprint import Fingerprint
from tasks.witness.plumbline_witness.record import headers_digest
from tests.audit.making import (
    by_code,
    edit_json,
    errors,
    make_adapter,
    make_model,
    wrapped,
    write_json,
)
from tests.weights.making import Spread, write_shards

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}\n"
GENERATION = {"eos_token_id": [2, 7], "temperature": 0.7}
TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": {"pad_id": 0},
    "added_tokens": [{"id": 4, "content": "é"}],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, "d": 3}, "merges": []},
}


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_model(tmp_path / "base")


@pytest.fixture
def source(tmp_path: Path, base: Path) -> Path:
    """Return an adapter's checkpoint that agrees with its record."""
    folder = make_adapter(tmp_path / "checkpoint-3")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    write_json(folder / "generation_config.json", {**GENERATION, "transformers_version": "5"})
    write_json(folder / "tokenizer.json", TOKENIZER)
    record = folder / "plumbline.witness"
    record.mkdir()
    ids, logprobs = np.zeros((2, 1), np.int32), np.zeros((2, 1), np.float32)
    Fingerprint(((1, 2, 3),), ids, logprobs, ids[:, 0], "trainer").save(record / "fingerprint.fp")
    live = {**TOKENIZER, "padding": None}  # the trainer pads, the record does not
    settings = json.loads((folder / "adapter_config.json").read_text())
    recorded = {**settings, "target_modules": ["v_proj", "q_proj"], "use_rslora": False}
    facts = {
        "format": 1,
        "step": 3,
        "probes": [{"kind": "row", "number": 0, "ids": [1, 2, 3], "text": None}],
        "quantization": {"method": "none"},
        "peft": {"active": ["default"], "adapters": {"default": recorded}},
        "base": {"name": "elsewhere/tiny", "headers_sha256": headers_digest(base)},
        "tokens": {
            "tokenizer": {
                "chat_template_sha256": sha256(TEMPLATE),
                "backend_sha256": sha256(
                    json.dumps(live, ensure_ascii=False, separators=(",", ":"))
                ),
                "length": 5,
            },
            "generation_config": GENERATION,
        },
        "versions": {"trl": "1.16.0"},
    }
    write_json(record / "witness.json", facts)
    return folder


def test_a_record_that_agrees_says_what_it_proves(source: Path, base: Path) -> None:
    report = audit(source, base=base)
    (line,) = [finding for finding in report.findings if finding.code == "WITNESS"]
    assert line.severity == "info"
    assert line.found.startswith("step 3, trl 1.16.0, 1 probes")
    for compared in ("adapter", "template", "tokenizer", "EOS", "tensors", "storage"):
        assert compared in line.found
    (source / "plumbline.witness" / "witness.json").unlink()
    assert "WITNESS" not in by_code(audit(source))


def edit_facts(source: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = source / "plumbline.witness" / "witness.json"
    facts = json.loads(path.read_text())
    change(facts)
    write_json(path, facts)


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    # how to plant it, and a text of the finding
    "alpha": (lambda s: edit_json(s / "adapter_config.json", lora_alpha=4), "lora_alpha: 4"),
    "template": (
        lambda s: (s / "chat_template.jinja").write_text(TEMPLATE + "{{ '<think>' }}"), "sha256 "
    ),
    "tokenizer": (lambda s: edit_json(s / "tokenizer.json", added_tokens=[]), "4 tokens"),
    "eos": (
        lambda s: edit_json(s / "generation_config.json", eos_token_id=2), "eos_token_id: 2"
    ),
    "base": (
        lambda s: make_model(s.parent / "base", {"model.norm.weight": np.ones(4, np.float32)}),
        "tensors with sha256"
    ),
    "nf4": (
        lambda s: edit_facts(s, lambda facts: facts.update(quantization={"method": "nf4"})),
        "not quantised"
    ),
    "newer": (
        lambda s: edit_facts(s, lambda facts: facts.update(format=99)), "a record of format 99"
    ),
    "hostile": (
        lambda s: edit_facts(s, lambda facts: facts.update(probes=7)), "no probes"
    ),
    "no versions": (
        lambda s: edit_facts(s, lambda facts: facts.update(versions=[])), "versions"
    ),
    "not json": (
        lambda s: (s / "plumbline.witness" / "witness.json").write_text("{"), "not JSON"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_difference(name: str, source: Path, base: Path) -> None:
    plant, text = FAULTS[name]
    plant(source)
    report = audit(source, base=base)
    findings = [each for each in report.findings if each.code == "WITNESS"]
    is_read = name not in ("newer", "hostile", "no versions", "not json")
    severity = "error" if name == "alpha" else "warning"
    assert [each.severity for each in findings] == [severity, "info"][: 1 + is_read]
    assert text in findings[0].found
    assert "CANNOT_JUDGE" not in by_code(report)


def test_a_repaired_copy_keeps_the_record_and_certifies_no_other_adapter(
    source: Path, base: Path, tmp_path: Path
) -> None:
    weights, record = source / "adapter_model.safetensors", "plumbline.witness/witness.json"
    save_file(wrapped(load_file(weights)), weights)
    (source / "notes" / "of").mkdir(parents=True)
    (source / "notes" / "of" / "training.txt").write_text("lr 1e-4")
    assert audit(source, base=base).mendable
    copy = repair(source, tmp_path / "copy", base=base).path
    for name in (record, "plumbline.witness/fingerprint.fp", "notes/of/training.txt"):
        assert (copy / name).read_bytes() == (source / name).read_bytes()
    edit_json(source / "adapter_config.json", use_rslora=True)
    assert not audit(source, base=base).mendable
    with pytest.raises(ContractError, match="WITNESS"):
        repair(source, tmp_path / "wrong", base=base)
    assert not (tmp_path / "wrong").exists()


LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
NAMES = [f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight" for half in "AB"]


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """Make the shards of an adapter that two ranks trained."""
    root = tmp_path / "ours"
    root.mkdir()
    write_shards(root, {name: torch.ones(4, 16).bfloat16() for name in NAMES}, Spread(world_size=2))
    write_json(root / "adapter_config.json", LORA | {"base_model_name_or_path": "/base"})
    return root


def test_shards_of_an_adapter(ours: Path) -> None:
    report = audit(ours)
    assert (report.kind, report.ok) == ("shards", True)
    (finding,) = report.findings
    assert (finding.code, finding.found) == ("ZERO_NOT_GATHERED", "2 ranks, 2 tensors, adapter")
    assert f"source={ours}" in finding.fix
    (ours / "adapter_config.json").unlink()
    assert by_code(audit(ours))["FILE_MISSING"] == "warning"


def test_unusable_shards(ours: Path) -> None:
    table = ours / "partitions.json"
    whole = table.read_text()
    next((ours / "shards").glob("rank-00001-*")).unlink()
    for text in (whole, "[]", '{"mode": []}'):
        table.write_text(text)
        report = audit(ours)
        assert (report.kind, errors(by_code(report)) >= {"ZERO_UNUSABLE"}) == ("shards", True)
        assert "CANNOT_JUDGE" not in by_code(report)
