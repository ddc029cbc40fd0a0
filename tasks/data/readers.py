"""Read rows from JSON Lines, CSV, Parquet or a `datasets` id, with one row in memory.

A line that cannot be read (broken JSON, bytes that are not UTF-8) is a `Row` with a problem, so the
caller sees every line. JSON is not read by `datasets`, which would give all rows the keys of all
others, with null.

`mix` reads several sources: without probabilities one after the other; with probabilities each row
comes from a source chosen at random, the same on every machine. It ends with the first source that
is exhausted (`first_exhausted`), or when all were read once (`all_exhausted`); smaller sources are
then read again from the start.
"""

from __future__ import annotations

import csv
import difflib
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.core.errors import DataError
from tasks.core.hub import hub_errors
from tasks.core.terminal import typed
from tasks.data.messages import Columns, kind_of
from tasks.weights.files.documents import once

FILE_KINDS = ("jsonl", "csv", "parquet")
HUB = "hub"
FIRST_EXHAUSTED, ALL_EXHAUSTED = "first_exhausted", "all_exhausted"
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Row:
    """One row: its place (`file:line`), its values by column, and the problem if it has none.

    `source` is the number of its source, and `again` is True if that was read before; see `mix`.
    """

    place: str
    values: dict[str, Any]
    problem: str = ""
    source: int = 0
    again: bool = False


@dataclass(frozen=True)
class Source:
    """One source of rows; `open` returns them from the start, once for every pass.

    Without a `probability` sources are read in order. `max_samples` limits the rows of one pass.
    """

    name: str
    open: Callable[[], Iterator[Row]]
    columns: Columns
    probability: float | None = None
    max_samples: int | None = None

    def rows(self) -> Iterator[Row]:
        """Return an iterator over its rows, for one pass."""
        return itertools.islice(self.open(), self.max_samples)


def mix(sources: Sequence[Source], *, seed: int, stopping: str) -> Iterator[Row]:
    """Yield the rows of all sources, of which all have a probability or none.

    Raises DataError if a source with a probability has no rows.
    """
    if sources[0].probability is None:
        for number, source in enumerate(sources):
            yield from (replace(row, source=number) for row in source.rows())
        return
    draw = random.Random(f"mix {seed}")
    numbers, weights = range(len(sources)), [source.probability or 0.0 for source in sources]
    streams = [source.rows() for source in sources]
    exhausted: set[int] = set()
    while True:
        (number,) = draw.choices(numbers, weights)
        row = next(streams[number], None)
        if row is None:
            exhausted.add(number)
            if stopping == FIRST_EXHAUSTED or len(exhausted) == len(sources):
                return
            streams[number] = sources[number].rows()
            row = next(streams[number], None)
            if row is None:
                raise DataError(f"{sources[number].name} has no rows to mix")
        yield replace(row, source=number, again=number in exhausted)


def wrong_probabilities(probabilities: Sequence[float | None]) -> str:
    """Return the problem with the probabilities of several sources; "" if there is none."""
    known = [p for p in probabilities if p is not None]
    if not known:
        return ""
    if len(known) < len(probabilities):
        missing = len(probabilities) - len(known)
        return f"{missing} of {len(probabilities)} sources have no probability: all of them or none"
    if min(known) <= 0:
        return f"probability {min(known):g} never selects a row"
    if abs(sum(known) - 1) > 1e-6:
        return f"probabilities add up to {sum(known):g}, not to 1"
    return ""


def read_rows(kind: str, source: str, *, split: str = "train") -> Iterator[Row]:
    """Yield the rows of a file, or of a split of a `datasets` id (kind `hub`).

    Raises DataError if the file or id cannot be read.
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
    """Return the path of a file; raise a DataError that names similar files if it does not exist.

    `key` is the setting that has the path.
    """
    file = Path(path).expanduser()
    if file.is_file():
        return file
    if file.is_dir():
        hint = typed(
            key, file / next(iter(sorted(entry.name for entry in file.iterdir())), "<file>")
        )
        raise DataError(f"{key}={path} is a folder, a file is needed", hint=hint)
    beside = [entry.name for entry in file.parent.iterdir()] if file.parent.is_dir() else []
    near = difflib.get_close_matches(file.name, beside, n=3)
    raise DataError(
        f"{key}={path}: no such file",
        details=[f"there is {file.parent / entry}" for entry in near],
        hint=typed(key, file.parent / near[0] if near else "<an existing file>"),
    )


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
                problem = _not_utf8(error)
            except (ValueError, RecursionError) as error:
                problem = f"invalid JSON: {error}"
            yield _object(f"{path.name}:{number}", values, problem)


def _json_array(path: Path) -> Iterator[Row]:
    """Yield the rows of a file that is one JSON array; the whole file is in memory."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=once)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: {_not_utf8(error)}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: invalid JSON: {error}") from error
    for number, values in enumerate(rows, start=1):
        yield _object(f"{path.name}:row {number}", values)


def _object(place: str, values: Any, problem: str = "") -> Row:
    if isinstance(values, dict):
        return Row(place, values, problem)
    return Row(place, {}, f"a JSON object is needed, found {kind_of(values)}")


def _csv_rows(path: Path) -> Iterator[Row]:
    csv.field_size_limit(1 << 30)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            # Excel separates by `;` or tabs; one of them alone in the header is the separator.
            first = file.readline()
            marks = [mark for mark in ",;\t" if mark in first]
            file.seek(0)
            reader = csv.reader(file, strict=True, delimiter=marks[0] if len(marks) == 1 else ",")
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
                    yield Row(place, {}, f"{len(fields)} fields, the header has {len(header)}")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: {_not_utf8(error)}") from error
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: invalid CSV: {error}") from error


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
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
    except (*hub_errors(), datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"data.name={name} split={split} cannot be loaded: {str(error).splitlines()[0]}",
            hint="check data.name and data.split, or use a file: data.path=<file>",
        ) from error
    for number, values in enumerate(table, start=1):
        yield Row(f"{name}[{split}]:row {number}", dict(values))


def _not_utf8(error: UnicodeDecodeError) -> str:
    return (
        f"not UTF-8: byte 0x{error.object[error.start]:02x}; convert it: iconv -f CP1252 -t UTF-8"
    )
