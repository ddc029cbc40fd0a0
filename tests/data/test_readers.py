"""Readers return every line in order, with its place."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from tasks.core.errors import DataError
from tasks.data.readers import Row, existing_file, read_rows


def _write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def test_jsonl_reports_each_bad_line_with_its_number(tmp_path: Path) -> None:
    twice = b'{"b": [{"a": 1, "a": 2}]}'
    lines = [b'{"a": 1}', b"", b'{"a": ', b'{"a": "\xff"}', b"[1]", b'{"b": 2}\r', twice]
    path = _write(tmp_path / "x.jsonl", b"\n".join(lines))
    rows = list(read_rows("jsonl", path))
    problems = {int(row.place.removeprefix("x.jsonl:")): row.problem for row in rows}
    assert [row.values for row in rows if not row.problem] == [{"a": 1}, {"b": 2}]
    for number, named in (
        (3, "JSON"), (4, "0xff"), (5, "a list"), (7, "duplicate key a"),
    ):  # fmt: skip
        assert named in problems[number]
    deep = b"[" * 200_000
    path = _write(tmp_path / "x.jsonl", b'\xef\xbb\xbf{"a": 1}\n' + deep + b"\n")
    first, second = read_rows("jsonl", path)
    assert first == Row("x.jsonl:1", {"a": 1})
    assert (second.place, second.problem != "") == ("x.jsonl:2", True)


def test_a_json_file_may_be_one_array(tmp_path: Path) -> None:
    array = _write(tmp_path / "x.json", b'\xef\xbb\xbf [{"a": "\xc3\xa9"},\n 7, {"b": [1]}]')
    assert list(read_rows("jsonl", array)) == [
        Row("x.json:row 1", {"a": "é"}),
        Row("x.json:row 2", {}, "a JSON object is needed, found a number"),
        Row("x.json:row 3", {"b": [1]}),
    ]
    lines = _write(tmp_path / "y.json", b'{"a": 1}\n{"a": 2}\n')
    assert [row.values for row in read_rows("jsonl", lines)] == [{"a": 1}, {"a": 2}]


def test_csv_keeps_quoted_newlines_and_reports_the_first_line_of_a_record(tmp_path: Path) -> None:
    text = b'prompt,response\nhi,"two\nlines"\nonly one\na,b,c\n'
    path = _write(tmp_path / "x.csv", text)
    assert list(read_rows("csv", path)) == [
        Row("x.csv:2", {"prompt": "hi", "response": "two\nlines"}),
        Row("x.csv:4", {}, "1 fields, the header has 2"),
        Row("x.csv:5", {}, "3 fields, the header has 2"),
    ]
    for mark in (";", "\t"):  # as Excel separates
        text = f"\ufeffprompt{mark}response\r\nhi, you{mark}yes, me\r\n"
        (row,) = read_rows("csv", _write(tmp_path / "x.csv", text.encode()))
        assert row.values == {"prompt": "hi, you", "response": "yes, me"}


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for kind, name, content, named in (
        ("csv", "x.csv", b"a,a\n1,2\n", "'a'"),
        ("csv", "y.csv", b"a,b\nx,\xff\n", "iconv -f CP1252"),
        ("csv", "z.csv", "a,b\nx,y\n".encode("utf-16"), "not UTF-8"),
        ("csv", "u.csv", b'a,b\n"open,z\n', r"u\.csv:"),
        ("parquet", "x.parquet", b"not parquet at all", "x.parquet"),
        ("jsonl", "z.json", b'[{"a": 1},\n', r"z\.json"),
    ):
        path = _write(tmp_path / name, content)
        with pytest.raises(DataError, match=named):
            list(read_rows(kind, path))
    _write(tmp_path / "train.jsonl", b"")
    with pytest.raises(DataError) as caught:
        existing_file(tmp_path / "trian.jsonl")
    assert caught.value.hint == f"data.path={tmp_path / 'train.jsonl'}"


def test_a_datasets_source_is_read_by_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` reads a folder in the layout of the hub, without the hub."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "chats"
    folder.mkdir()
    for split, count in (("train", 3), ("test", 1)):
        table = pyarrow.table({"prompt": [f"{split} {i}" for i in range(count)]})
        parquet.write_table(table, folder / f"{split}.parquet")
    assert list(read_rows("hub", str(folder), split="train")) == [
        Row(f"{folder}[train]:row {i + 1}", {"prompt": f"train {i}"}) for i in range(3)
    ]
    with pytest.raises(DataError, match="split=dev"):
        list(read_rows("hub", str(folder), split="dev"))


@given(content=st.binary(max_size=200))
def test_any_bytes_give_one_row_a_line_that_is_not_blank(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("rows") / "x.jsonl"
    path.write_bytes(content)
    text = content.removeprefix(b"\xef\xbb\xbf")
    lines = [n for n, line in enumerate(text.split(b"\n"), start=1) if line.strip()]
    places = [int(row.place.partition(":")[2]) for row in read_rows("jsonl", str(path))]
    assert places == lines
