"""Read rows from JSON Lines, CSV, Parquet or a `datasets` id, with one row in memory.

A line that cannot be read (broken JSON, bytes that are not UTF-8) is a `Row` with a problem, so the
caller sees every line. JSON is not read by `datasets`, which would give all rows the keys of all
others, with null.
"""

from __future__ import annotations

import csv
import difflib
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.errors import DataError
from tasks.core.terminal import typed
from tasks.weights.files.documents import once

FILE_KINDS = ("jsonl", "csv", "parquet")
HUB = "hub"
LONGEST_FIELD = 1 << 30
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Row:
    """One row: its place (`file:line`), its values by column, and the problem if it has none."""

    place: str
    values: dict[str, Any]
    problem: str = ""


def read_rows(kind: str, source: str, *, split: str = "train") -> Iterator[Row]:
    """Yield the rows of a file, or of a split of a `datasets` id (kind `hub`).

    Raises:
        DataError: the file or id cannot be read.
    """
    if kind == HUB:
        yield from _hub_rows(source, split=split)
        return
    readers = {"jsonl": _jsonl_rows, "csv": _csv_rows, "parquet": _parquet_rows}
    file = existing_file(source)
    try:
        yield from readers[kind](file)
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error


def existing_file(path: str | Path, *, key: str = "data.path") -> Path:
    """Return the path of a file; otherwise raise a `DataError` that names similar files.

    `key` is the setting that has the path.
    """
    file = Path(path).expanduser()
    if file.is_file():
        return file
    if file.is_dir():
        inside = sorted(entry.name for entry in file.iterdir())[:10]
        raise DataError(
            f"{key}={path} is a folder, a file is needed",
            details=[f"it holds {entry}" for entry in inside],
            hint=typed(key, file / (inside[0] if inside else "train.jsonl")),
        )
    beside = [entry.name for entry in file.parent.iterdir()] if file.parent.is_dir() else []
    near = difflib.get_close_matches(file.name, beside, n=3)
    raise DataError(
        f"{key}={path}: no such file",
        details=[f"there is {file.parent / entry}" for entry in near],
        hint=typed(key, file.parent / near[0] if near else "<an existing file>"),
    )


def kind_of(value: object) -> str:
    """Return the JSON type of a value, for messages."""
    names = {bool: "true or false", int: "a number", float: "a number", str: "text",
             list: "a list", dict: "an object", type(None): "null"}  # fmt: skip
    return names.get(type(value), type(value).__name__)


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        if path.suffix == ".json" and file.read(64).removeprefix(_BOM).lstrip()[:1] == b"[":
            yield from _json_array(path)
            return
        file.seek(0)
        for number, raw in enumerate(file, start=1):
            line = raw.removeprefix(_BOM) if number == 1 else raw
            if not line.strip():
                continue
            values, problem = {}, ""
            try:
                values = json.loads(line.decode().rstrip("\r\n"), object_pairs_hook=once)
            except UnicodeDecodeError as error:
                problem = _not_utf8(error, path)
            except json.JSONDecodeError as error:
                problem = f"invalid JSON: {error.msg} at column {error.colno}"
            except (ValueError, RecursionError) as error:
                problem = f"invalid JSON: {error}"
            yield _row(f"{path.name}:{number}", values, problem)


def _json_array(path: Path) -> Iterator[Row]:
    """Yield the rows of a file that is one JSON array; the whole file is in memory."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=once)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: {_not_utf8(error, path)}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: invalid JSON: {error}") from error
    for number, values in enumerate(rows, start=1):
        yield _row(f"{path.name}:row {number}", values)


def _row(place: str, values: Any, problem: str = "") -> Row:
    if not isinstance(values, dict):
        return Row(place, {}, f"a JSON object is needed, found {kind_of(values)}")
    return Row(place, values, problem)


def _csv_rows(path: Path) -> Iterator[Row]:
    csv.field_size_limit(LONGEST_FIELD)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            # Excel separates by `;` or tabs; one of them alone in the header is the separator.
            first = file.readline()
            marks = [mark for mark in ",;\t" if mark in first]
            file.seek(0)
            separator = marks[0] if len(marks) == 1 else ","
            reader = csv.reader(file, strict=True, delimiter=separator)
            header = next(reader, [])
            if not header or len(set(header)) < len(header):
                twice = next((name for name in header if header.count(name) > 1), "")
                problem = f"column {twice!r} occurs twice" if header else "it is empty"
                raise DataError(f"{path}: line 1 is no header: {problem}")
            last = reader.line_num
            for fields in reader:
                place, last = f"{path.name}:{last + 1}", reader.line_num
                if len(fields) == len(header):
                    yield Row(place, dict(zip(header, fields, strict=True)))
                elif fields:
                    problem = f"{len(fields)} fields, the header has {len(header)}"
                    yield Row(place, {}, problem)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: {_not_utf8(error, path)}") from error
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: invalid CSV: {error}") from error


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        number = 0
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for values in batch.to_pylist():
                number += 1
                yield Row(f"{path.name}:row {number}", values)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not readable as Parquet: {error}") from error


def _hub_rows(name: str, *, split: str) -> Iterator[Row]:
    import datasets

    try:
        table = datasets.load_dataset(name, split=split)
    except (OSError, ValueError) as error:
        raise DataError(
            f"data.name={name} split={split} cannot be loaded: {str(error).splitlines()[0]}",
            hint="check data.name and data.split, or use a file: data.path=<file>",
        ) from error
    for number, values in enumerate(table, start=1):
        yield Row(f"{name}[{split}]:row {number}", dict(values))


def _not_utf8(error: UnicodeDecodeError, path: Path) -> str:
    """Return the byte that is not UTF-8, and a command that converts the file."""
    with path.open("rb") as file:
        wide = file.read(2) in (b"\xff\xfe", b"\xfe\xff")  # as PowerShell and Excel write it
    encoding = "UTF-16" if wide else "CP1252"
    new = path.with_name(f"{path.stem}.utf8{path.suffix}")
    command = f"iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > {shlex.quote(str(new))}"
    return f"not UTF-8: byte 0x{error.object[error.start]:02x}; if it is {encoding}: {command}"
