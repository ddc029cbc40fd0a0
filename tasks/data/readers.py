"""Read rows from JSON Lines, CSV, Parquet or a `datasets` id.

Each reader is a generator that holds one row (Parquet: one batch) in memory. A line that cannot be
read (broken JSON, bytes that are not UTF-8) is a `Row` with a problem, so the caller sees every
line.
"""

from __future__ import annotations

import csv
import difflib
import json
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
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
    """Return an iterator over the rows of a source.

    Args:
        kind: "jsonl", "csv", "parquet" or "hub".
        source: path of the file, or the `datasets` id.
        split: split of the `datasets` id.

    Raises:
        DataError: the kind is unknown, or the file or id cannot be read.
    """
    if kind == HUB:
        return _hub_rows(source, split=split)
    readers = {"jsonl": _jsonl_rows, "csv": _csv_rows, "parquet": _parquet_rows}
    if kind not in readers:
        raise DataError(
            f"data.kind={kind} is not known",
            hint=f"data.kind is one of toy, {', '.join([*FILE_KINDS, HUB])}",
        )
    file = existing_file(source)
    if kind != "parquet":
        _refuse_utf16(file)
    return _guarded(readers[kind](file), source)


def existing_file(path: str | Path, *, key: str = "data.path") -> Path:
    """Return the path of a file; otherwise raise a `DataError` that names similar files.

    Args:
        path: the path; `~` is expanded.
        key: setting that has the path, for the error.
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


def _guarded(rows: Iterator[Row], path: str) -> Iterator[Row]:
    """Yield the rows; turn an OSError into a DataError."""
    try:
        yield from rows
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _refuse_utf16(path: Path) -> None:
    """Raise DataError for a file in UTF-16 or UTF-32, as PowerShell and Excel write it."""
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError:  # reported by `_guarded`
        return
    marked = start.startswith((b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff"))
    halves = {start[0::2].strip(b"\0"), start[1::2].strip(b"\0")}  # ASCII in UTF-16 without a mark
    if not marked and (len(start) < 4 or b"" not in halves or halves == {b""}):
        return
    wide = start.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff"))
    plain = "UTF-16LE" if start[1:2] == b"\0" else "UTF-16BE"
    name = "UTF-32" if wide else "UTF-16" if marked else plain
    raise DataError(f"{path}: {name}, not UTF-8", hint=_iconv(name, path))


def _iconv(name: str, path: Path) -> str:
    """Return the command that makes a copy of a file in UTF-8."""
    new = path.with_name(f"{path.stem}.utf8{path.suffix}")
    return f"iconv -f {name} -t UTF-8 {shlex.quote(str(path))} > {shlex.quote(str(new))}"


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        if path.suffix == ".json" and file.read(64).removeprefix(_BOM).lstrip()[:1] == b"[":
            yield from _json_array(path)
            return
        file.seek(0)
        for number, raw in enumerate(file, start=1):
            line = raw.removeprefix(_BOM) if number == 1 else raw
            if line.strip():
                yield _json_row(f"{path.name}:{number}", line, path)


def _json_array(path: Path) -> Iterator[Row]:
    """Yield the rows of a file that is one JSON array; the whole file is in memory."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=once)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: {_not_utf8(error, path)}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: invalid JSON: {error}") from error
    for number, values in enumerate(rows, start=1):
        place = f"{path.name}:row {number}"
        wrong = f"a JSON object is needed, found {kind_of(values)}"
        yield Row(place, values) if isinstance(values, dict) else Row(place, {}, wrong)


def _json_row(place: str, line: bytes, path: Path) -> Row:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return Row(place, {}, _not_utf8(error, path))
    try:
        values = json.loads(text.rstrip("\r\n"), object_pairs_hook=once)
    except json.JSONDecodeError as error:
        return Row(place, {}, f"invalid JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return Row(place, {}, f"invalid JSON: {error}")
    if not isinstance(values, dict):
        return Row(place, {}, f"a JSON object is needed, found {kind_of(values)}")
    return Row(place, values)


def _csv_rows(path: Path) -> Iterator[Row]:
    undecodable: list[str] = []
    previous_limit = csv.field_size_limit(LONGEST_FIELD)
    try:
        with path.open("rb") as file:
            separator = _separator(file.readline())
            file.seek(0)
            reader = csv.reader(_decoded(file, path, undecodable), strict=True, delimiter=separator)
            header: list[str] | None = None
            last = 0
            while True:
                try:
                    fields = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    fields, problem = [], f"invalid CSV: {error}"
                else:
                    problem = undecodable[0] if undecodable else ""
                place, last = f"{path.name}:{last + 1}", reader.line_num
                undecodable.clear()
                if header is None:
                    header = _csv_header(path, fields, problem)
                elif problem:
                    yield Row(place, {}, problem)
                elif len(fields) != len(header) and fields:
                    problem = f"{len(fields)} fields, the header has {len(header)}"
                    yield Row(place, {}, problem)
                elif fields:
                    yield Row(place, dict(zip(header, fields, strict=True)))
    finally:
        csv.field_size_limit(previous_limit)


def _separator(header: bytes) -> str:
    """Return `;` or a tab if it alone separates the header, as in Excel's files; else a comma."""
    separators = [mark for mark in ",;\t" if mark.encode() in header]
    return separators[0] if len(separators) == 1 else ","


def _csv_header(path: Path, fields: list[str], problem: str) -> list[str]:
    doubled = sorted({name for name in fields if fields.count(name) > 1})
    if doubled:
        problem = f"column {doubled[0]!r} occurs twice"
    if problem or not fields:
        raise DataError(f"{path}: line 1 is no header: {problem or 'it is empty'}")
    return fields


def _decoded(file: Any, path: Path, undecodable: list[str]) -> Iterator[str]:
    """Yield lines as text. Add a problem to `undecodable` for a line that is not UTF-8."""
    for number, raw in enumerate(file, start=1):
        line = raw.removeprefix(_BOM) if number == 1 else raw
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            undecodable.append(_not_utf8(error, path, f" of line {number}"))
            yield line.decode("utf-8", errors="replace")


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        source = parquet.ParquetFile(path)
        number = 0
        for batch in source.iter_batches(batch_size=1024):
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


def _not_utf8(error: UnicodeDecodeError, path: Path, line: str = "") -> str:
    """Return the byte that is not UTF-8, and the command if the whole file has another encoding."""
    encoding = _encoding(path)
    command = f": {_iconv(encoding, path)}" if encoding else ""
    at = f"0x{error.object[error.start]:02x} at position {error.start + 1}"
    return f"not UTF-8: byte {at}{line}{command}"


@lru_cache(maxsize=8)
def _encoding(path: Path) -> str:
    """Return the encoding of a file with a byte that is not UTF-8; "" if other lines are UTF-8."""
    with path.open("rb") as file:
        beginning = file.read(1 << 20)
    for line in beginning.splitlines():
        with suppress(UnicodeDecodeError):
            if not line.isascii() and line.decode("utf-8-sig"):
                return ""
    # Other scripts have long runs of such bytes; Western texts have single letters.
    return "<its encoding>" if re.search(rb"[\x80-\xff]{3}", beginning) else "CP1252"


def kind_of(value: object) -> str:
    """Return the JSON type of a value, for messages."""
    names = {bool: "true or false", int: "a number", float: "a number", str: "text",
             list: "a list", dict: "an object", type(None): "null"}  # fmt: skip
    return names.get(type(value), type(value).__name__)
