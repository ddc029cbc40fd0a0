"""An audit of real checkpoints finds that their files agree with their records."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.audit.run import audit
from tests.audit.making import by_code, edit_json
from tests.witness.conftest import train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["lora", "qlora", "sft", "full"])
def test_the_files_of_a_training_agree_with_its_record(
    kind: str, base: Path, tmp_path: Path
) -> None:
    trained = train(base, tmp_path / "out", kind)
    source = trained.out / "checkpoint-2"
    report = audit(source, base=base)
    expected = {"WITNESS"} | ({"WITNESS_QUANTISATION"} if kind == "qlora" else set())
    assert {code for code in by_code(report) if code.startswith("WITNESS")} == expected
    (line,) = [finding.found for finding in report.findings if finding.code == "WITNESS"]
    agree = ["the chat template", "the tokenizer", "the base's tensors"]
    agree += [] if kind == "full" else ["the adapter's settings"]
    assert [part for part in agree if part not in line] == []
    if kind == "lora":
        edit_json(source / "adapter_config.json", lora_alpha=16)
        assert by_code(audit(source, base=base))["WITNESS_ADAPTER"] == "error"
