"""The plan names mistakes in a user's files, before hours in a queue."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from flows.cli.config import compose_config
from tasks.config.checks import findings
from tasks.config.checks.inputs import PEEK
from tests.witness.conftest import make_base

CHAT = {"prompt": "q", "response": "a"}
PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
MISFITS: list[tuple[str, list[dict[str, Any]], list[str], str]] = [
    ("sft_full", [{"promt": "q", "response": "a"}], [], "data.prompt_key=promt"),
    ("dpo", [CHAT], [], "'chosen'"),
    ("sft_full", [CHAT, {"prompt": "q"}], [], "data.on_bad_line=skip"),
    ("grpo", [{"prompt": "q", "solution": 4}], ["reward.function=exact_match"], "no answer"),
    ("sft_full", [], [], "0 rows"),
    ("sft_full", [CHAT | {"system": "s"}], [], "data.system_key=system"),
    ("sft_full", [CHAT, CHAT | {"system": "s"}], ["data.system_key=sytem"], "_key=system"),
    ("sft_full", [CHAT | {"system_prompt": "s"}], [], "data.system_key=system_prompt"),
    ("grpo", [{"prompt": "q", "system": "s"}], [], "data.system_key=system"),
    ("dpo", [PAIR | {"system": "s"}], [], "data.system_key=system"),
    ("sft_full", [CHAT | {"reasoning": "r s"}], [], "data.ignored_columns=[reasoning]"),
    ("sft_full", [{"messages": TURNS, "thinking": "r s"}], [], "data.ignored_columns=[thinking]"),
    ("dpo", [PAIR | {"input": "x"}], [], "data.ignored_columns=[input]"),
    ("sft_full", [{"prompt": "q"}] + [CHAT] * PEEK, [], f"1 of the first {PEEK} rows"),
    ("kto", [CHAT | {"label": True}, {**CHAT, "prompt": "p", "label": 1}], [], "data.label_key"),
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
        if text.startswith("data")
    )  # fmt: skip
    assert named in finding
    places = re.findall(r"rows\.jsonl:\d+", finding)
    assert len(places) == len(set(places)), "a bad row is printed once"


READ: list[tuple[str, dict[str, Any], list[str]]] = [
    ("sft_full", CHAT | {"system": "", "thinking": "off"}, []),
    ("sft_full", CHAT | {"system": [], "reasoning": False}, []),
    ("sft_full", {"messages": TURNS, "prompt": "q", "input": "x"}, []),
    ("sft_full", CHAT | {"system": "s"}, ["data.system_key=system"]),
    ("sft_full", CHAT | {"system": "s", "input": "x"}, ["data.ignored_columns=[system,input]"]),
    ("sft_full", {"messages": [{"role": "system", "content": "s"}, *TURNS], "system": "s"}, []),
    ("sft_full", {"messages": [TURNS[0], TURNS[1] | {"thinking": "r"}], "reasoning": "r"}, []),
    ("sft_full", {"text": "t", "thinking": "x"}, ["data.text_key=text"]),
    ("grpo", {"prompt": "q", "answer": "a", "reasoning": "r", "input": "x"}, []),
]


@pytest.mark.parametrize(("experiment", "row", "words"), READ)
def test_columns_that_are_read_or_left_out_on_purpose(
    experiment: str, row: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    other = json.loads(json.dumps(row).replace('"q"', '"p"').replace('"t"', '"u"'))
    file.write_text("".join(json.dumps(each) + "\n" for each in (row, other)))
    texts = problems(tmp_path, f"+exp={experiment}", f"data.path={file}", *words)
    assert not [text for text in texts if text.startswith("data:")]


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


@pytest.mark.parametrize(
    ("experiment", "words", "left"),
    [
        ("sft_full", ["train.max_len=12", "train.on_overlong=refuse"], False),
        ("sft_full", ["train.max_len=200"], True),
        ("grpo", ["rollout.max_prompt_len=12", "rollout.max_new_tokens=8"], False),
    ],
)
def test_rows_that_keep_no_label_are_refused_by_the_plan(
    experiment: str, words: list[str], left: bool, tmp_path: Path
) -> None:
    """With the tokenizer of a base in a local folder, not after the download of a cluster's job."""
    base, file = make_base(tmp_path / "base"), tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{n} what is the sum of 4 and 5 and 6", "response": "9"} for n in range(9)]
    file.write_text("".join(json.dumps(row | {"answer": "9"}) + "\n" for row in rows))
    words = [*words, f"model.path={base}", f"data.path={file}", "data.ignored_columns=[answer]"]
    texts = [t for t in problems(tmp_path, f"+exp={experiment}", *words) if t.startswith("data")]
    assert len(texts) == (not left), texts
    assert all("max_len=" in text or "max_prompt_len=" in text for text in texts)
