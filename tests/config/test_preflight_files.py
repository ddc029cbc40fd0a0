"""Checks of the data files."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import strategies as st
from pyarrow import parquet

from flows.cli.config import compose_config
from tasks.config.checks import data

SIZES = st.integers(1, 64)


def data_settings(**changes: Any) -> dict[str, Any]:
    return {**_jsonl(), **changes}


@cache
def _jsonl() -> dict[str, Any]:
    data_section: dict[str, Any] = compose_config(["data=jsonl"]).settings["data"]
    return data_section


@pytest.mark.parametrize(
    ("text", "value", "override"),
    [
        ("", "rows.jsonl has no rows", "data.path=<file>"),
        ("{broken\n", "rows.jsonl:1: invalid JSON", "data=jsonl|csv|parquet"),
        ('{"promt": "a", "response": "b"}\n', "no column 'prompt'", "data.prompt_key=promt"),
        ('{"message": []}\n', "no column 'messages'", "data.messages_key=message"),
        ('{"prompt": "a", "x": "b"}\n', "no column 'response'", "data.response_key=<column>"),
    ],
)
def test_data_that_does_not_fit(tmp_path: Path, text: str, value: str, override: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    (finding,) = data.readable(data_settings(path=str(file)))
    assert value in finding.found
    assert finding.override == override


@pytest.mark.parametrize("text", ['{"messages": []}\n', '{broken\n{"messages": []}\n'])
def test_data_that_fits(tmp_path: Path, text: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text)  # single bad rows are for data.on_bad_line
    assert data.readable(data_settings(path=str(file), on_bad_line="skip")) == []


def test_data_files_that_do_not_exist(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    wrong = str(tmp_path / "row.jsonl")
    settings = data_settings(path=wrong, eval_path=str(tmp_path), chat_template=wrong)
    findings = {f.what: f for f in data.readable(settings)}
    assert list(findings) == ["data.chat_template", "data.path", "data.eval_path"]
    assert findings["data.path"].found == f"{wrong}: no such file"
    assert findings["data.path"].override == f"data.path={tmp_path}/rows.jsonl"
    assert "is a folder" in findings["data.eval_path"].found
    (finding,) = data.readable(data_settings())
    assert str(finding) == "data.path: nothing; has to be given -> data.path=<file>"
    (finding,) = data.readable(data_settings(kind="hub"))
    assert finding.override == "data.name=owner/name"


def test_columns_of_csv_and_parquet(tmp_path: Path) -> None:
    table = {"question": ["a"], "response": ["b"]}
    (tmp_path / "rows.csv").write_text("question,response\na,b\n")
    parquet.write_table(pyarrow.table(table), tmp_path / "rows.parquet")
    for kind in ("csv", "parquet"):
        settings = data_settings(kind=kind, path=str(tmp_path / f"rows.{kind}"), messages_key=None)
        (finding,) = data.readable(settings)
        assert finding.allowed == "the columns are question, response"
        assert data.readable({**settings, "prompt_key": "question"}) == []
