"""Raw texts, as in pre-training: rows, splits, and findings of the preflight."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from flows.cli.config import compose_config
from tasks.config.checks import data
from tasks.config.checks.objective import raw_texts
from tasks.core.errors import DataError
from tasks.data.columns import Columns
from tasks.data.kinds import document
from tasks.data.messages import Unusable
from tasks.prepare import prepare_data

LOG = logging.getLogger("tests.data")
BOOK = "It was a dark night.\n\n  And stormy.\n"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"body": "a"}, "no 'text', the column of the text"),
        ({"text": 3}, "'text' must be text, found a number"),
        ({"text": " \n"}, "'text' is empty: there is nothing to learn"),
        ({"text": "a\ud800"}, "'text' has half of a surrogate pair at 2"),
    ],
)
def test_rows_that_are_no_texts(row: dict[str, Any], why: str) -> None:
    with pytest.raises(Unusable) as caught:
        document(row, Columns(text="text"))
    assert str(caught.value) == why


def test_a_text_passes_through_unchanged() -> None:
    assert document({"body": BOOK, "n": 1}, Columns(text="body")) == {"text": BOOK}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_share_of_the_texts_is_held_out(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", *({"text": f"{BOOK}{n}"} for n in range(60)))
    (out := tmp_path / "out").mkdir()
    report = prepare_data(out, kind="jsonl", rows="texts", path=str(path), text_key="text",
                          eval_fraction=0.3, log=LOG)  # fmt: skip
    assert all(check.ok for check in report.checks)
    sides = [(out / f"{split}.jsonl").read_text().splitlines() for split in ("train", "heldout")]
    rows = [json.loads(line) for side in sides for line in side]
    assert sorted(row["text"] for row in rows) == sorted(f"{BOOK}{n}" for n in range(60))
    assert 8 <= len(sides[1]) <= 30
    assert all(set(row) == {"id", "text"} for row in rows)


def findings_of(train: str, *overrides: str) -> list[str]:
    settings = compose_config([f"train={train}", *overrides]).settings
    findings = data.readable(settings["data"], settings["train"]["objective"])
    return [str(finding) for finding in [*findings, *raw_texts(settings)]]


def test_settings_that_fit_raw_texts(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"text": BOOK}, {"text": "another"})
    source = ("data=jsonl", f"data.path={path}")
    assert findings_of("pretrain", *source, "data.text_key=text") == []
    (wrong,) = findings_of("sft", *source, "data.text_key=text")
    assert wrong.endswith("-> train=pretrain")
    (wrong,) = findings_of("sft", *source)  # told by its rows
    assert wrong.endswith("-> train=pretrain data.text_key=text")
    (wrong,) = findings_of("pretrain", *source, "data.text_key=txt")
    assert wrong.endswith("-> data.text_key=text")
    (wrong,) = findings_of("sft", "train.on_overlong=split")
    assert wrong.startswith("train.on_overlong: ")
    (wrong,) = findings_of("pretrain", *source, "data.text_key=text", "gate.min_eval_gain=1")
    assert wrong.startswith("gate.min_eval_gain: ")
    lines = findings_of("dpo", *source, "data.text_key=text")
    assert any(line.startswith("data.text_key: ") for line in lines)
    (wrong,) = findings_of("pretrain", "data.text_key=text")
    assert wrong.startswith("data.text_key: ")


def test_every_source_holds_texts_or_none_does(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"text": BOOK}, {"text": "another"})
    several = f"data.sources=[{{path: {path}, text_key: text}},{{path: {path}}}]"
    lines = findings_of("pretrain", "data=jsonl", several)
    assert any(line.startswith("data.sources[1].text_key: ") for line in lines)
    assert findings_of("pretrain", "data=jsonl", several, "data.text_key=text") == []


def test_an_empty_text_is_named_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"text": BOOK}, {"text": ""}, {"text": "more"})
    (out := tmp_path / "out").mkdir()
    with pytest.raises(DataError, match=r"x\.jsonl:2: "):
        prepare_data(out, kind="jsonl", rows="texts", path=str(path), text_key="text", log=LOG)
