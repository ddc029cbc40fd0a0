"""A checkpoint's files beside the record that its training left: one planted difference each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tasks.audit.repair import repair
from tasks.audit.run import Report, audit
from tasks.core.errors import ContractError
from tasks.drift.fingerprint import Fingerprint
from tasks.witness.plumbline_witness.facts import headers_digest
from tests.audit.making import by_code, edit_json, make_adapter, make_model, write_json

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
    probes = ((1, 2, 3),)
    print_ = Fingerprint(
        probes,
        np.zeros((2, 1), np.int32),
        np.zeros((2, 1), np.float32),
        np.zeros(2, np.int32),
        "trainer",
    )
    print_.save(record / "fingerprint.fp")
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


def codes_of(report: Report) -> dict[str, str]:
    return {code: s for code, s in by_code(report).items() if code.startswith("WITNESS")}


def test_a_record_that_agrees_says_what_it_proves(source: Path, base: Path) -> None:
    report = audit(source, base=base)
    assert codes_of(report) == {"WITNESS": "info"}
    (line,) = [finding for finding in report.findings if finding.code == "WITNESS"]
    assert line.found == (
        "step 3, trl 1.16.0, 1 probes; agree with it: the adapter's settings, the chat template, "
        "the tokenizer, EOS and generation settings, the base's tensors, the storage of the base"
    )
    assert "It proves what was trained, not what the weights" in line.why
    assert f"source={source}" in line.fix


def edit_facts(source: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = source / "plumbline.witness" / "witness.json"
    facts = json.loads(path.read_text())
    change(facts)
    write_json(path, facts)


FAULTS: dict[str, tuple[Callable[[Path], Any], str, str, str]] = {
    "alpha": (
        lambda s: edit_json(s / "adapter_config.json", lora_alpha=4),
        "WITNESS_ADAPTER", "error", "lora_alpha: 4",
    ),
    "rslora": (
        lambda s: edit_json(s / "adapter_config.json", use_rslora=True),
        "WITNESS_ADAPTER", "error", "use_rslora: True",
    ),
    "targets": (
        lambda s: edit_json(s / "adapter_config.json", target_modules=["q_proj"]),
        "WITNESS_ADAPTER", "error", "target_modules: q_proj",
    ),
    "template": (
        lambda s: (s / "chat_template.jinja").write_text(TEMPLATE + "{{ '<think>' }}"),
        "WITNESS_TEMPLATE", "warning", "sha256 ",
    ),
    "tokenizer": (
        lambda s: edit_json(s / "tokenizer.json", added_tokens=[]),
        "WITNESS_TOKENIZER", "warning", "4 tokens",
    ),
    "eos": (
        lambda s: edit_json(s / "generation_config.json", eos_token_id=2),
        "WITNESS_GENERATION", "warning", "eos_token_id: 2",
    ),
    "temperature": (
        lambda s: edit_json(s / "generation_config.json", temperature=None),
        "WITNESS_GENERATION", "warning", "temperature: None",
    ),
    "base": (
        lambda s: make_model(s.parent / "base", {"model.norm.weight": np.ones(4, np.float32)}),
        "WITNESS_BASE", "warning", "names, dtypes and shapes",
    ),
    "nf4": (
        lambda s: edit_facts(s, lambda facts: facts.update(quantization={"method": "nf4"})),
        "WITNESS_QUANTISATION", "warning", "not quantised",
    ),
    "quantised base": (
        lambda s: edit_json(
            s.parent / "base" / "config.json", quantization_config={"quant_method": "gptq"}
        ),
        "WITNESS_QUANTISATION", "warning", "gptq",
    ),
    "newer": (
        lambda s: edit_facts(s, lambda facts: facts.update(format=99)),
        "WITNESS_UNREADABLE", "warning", "a record of format 99",
    ),
    "incomplete": (
        lambda s: (s / "plumbline.witness" / "fingerprint.fp").unlink(),
        "WITNESS_UNREADABLE", "warning", "no measured file",
    ),
    "hostile": (
        lambda s: edit_facts(s, lambda facts: facts.update(probes=7, versions=[])),
        "WITNESS_UNREADABLE", "warning", "no probes",
    ),
    "not json": (
        lambda s: (s / "plumbline.witness" / "witness.json").write_text("{"),
        "WITNESS_UNREADABLE", "warning", "not JSON",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_one_planted_difference(name: str, source: Path, base: Path) -> None:
    plant, code, severity, text = FAULTS[name]
    plant(source)
    report = audit(source, base=base)
    assert codes_of(report) == {
        code: severity, **({} if code == "WITNESS_UNREADABLE" else {"WITNESS": "info"})
    }  # fmt: skip
    (finding,) = [finding for finding in report.findings if finding.code == code]
    assert text in finding.found
    assert "CANNOT_JUDGE" not in by_code(report)


def test_odd_values_do_not_stop_the_audit(source: Path, base: Path) -> None:
    def odd(facts: dict[str, Any]) -> None:
        facts.update(peft=[], tokens={"tokenizer": 3, "generation_config": "x"}, base=None)

    edit_facts(source, odd)
    assert codes_of(audit(source, base=base)) == {"WITNESS": "info"}


def test_a_checkpoint_without_a_record_has_no_line(source: Path) -> None:
    (source / "plumbline.witness" / "witness.json").unlink()
    assert codes_of(audit(source)) == {}


def test_a_repair_keeps_the_record_and_does_not_certify_another_adapter(
    source: Path, tmp_path: Path
) -> None:
    (source / "1_Pooling").mkdir()
    write_json(source / "1_Pooling" / "config.json", {"pooling_mode_lasttoken": True})
    (source / "1_Pooling" / "state.pt").write_bytes(b"")
    save_file({"x": np.ones(2, np.float32)}, source / "other.safetensors")
    done = repair(source, tmp_path / "kept")
    for name in ("plumbline.witness/witness.json", "plumbline.witness/fingerprint.fp"):
        assert (tmp_path / "kept" / name).read_bytes() == (source / name).read_bytes()
    assert (tmp_path / "kept/1_Pooling/config.json").is_file()
    assert "left out 1_Pooling/state.pt" in done.done
    edit_json(source / "adapter_config.json", use_rslora=True)
    assert not audit(source).mendable
    with pytest.raises(ContractError, match="WITNESS_ADAPTER"):
        repair(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()
