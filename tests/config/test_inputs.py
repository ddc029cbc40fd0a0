"""The plan names mistakes in a user's files, before hours in a queue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.cli.config import compose_config
from tasks.config.checks import findings
from tasks.config.checks.inputs import PEEK
from tests.witness.conftest import make_base

CHAT = {"prompt": "q", "response": "a"}
MISFITS: list[tuple[str, list[dict[str, Any]], list[str], str]] = [
    ("sft_full", [{"promt": "q", "response": "a"}], [], "data.prompt_key=promt"),
    ("dpo", [CHAT], [], "'chosen'"),
    ("sft_full", [CHAT, {"prompt": "q"}], [], "data.on_bad_line=skip"),
    ("grpo", [{"prompt": "q", "solution": 4}], ["reward.function=exact_match"], "no answer"),
    ("sft_full", [], [], "0 rows"),
]
"""Experiment, rows, settings, and the thing that the finding names."""


def problems(tmp_path: Path, *words: str) -> list[str]:
    settings = compose_config([*words, f"paths.runs={tmp_path / 'runs'}"]).settings
    return [str(finding) for finding in findings(settings, tmp_path / "runs")]


@pytest.mark.parametrize(("experiment", "rows", "words", "named"), MISFITS)
def test_rows_that_an_objective_cannot_read(
    experiment: str, rows: list[dict[str, Any]], words: list[str], named: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (finding,) = (
        text for text in problems(tmp_path, f"+exp={experiment}", f"data.path={file}", *words)
        if text.startswith("data:")
    )  # fmt: skip
    assert named in finding


def test_equal_first_rows_are_no_empty_split(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [CHAT] * PEEK + [{"prompt": f"question {number}", "response": "a"} for number in "12"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert not [text for text in problems(tmp_path, "+exp=sft_full", f"data.path={file}")
                if text.startswith("data:")]  # fmt: skip


def test_a_base_with_a_damaged_tokenizer(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    (base / "tokenizer.json").write_text("{")
    (finding,) = (
        text for text in problems(tmp_path, "+exp=sft_full", f"model.path={base}")
        if text.startswith("model.path")
    )  # fmt: skip
    assert "tokenizer.json" in finding
