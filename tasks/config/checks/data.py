"""The data files: their first rows, read as `prepare_data` reads them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.config.checks.context import Context
from tasks.core.errors import DataError
from tasks.core.finding import Finding
from tasks.data.build import BadRows
from tasks.data.columns import Columns
from tasks.data.control import Control
from tasks.data.kinds import Kind, kind_for, names_texts
from tasks.data.messages import Unusable
from tasks.data.readers import FILE_KINDS, existing_file, read_rows
from tasks.data.reading import Reading
from tasks.data.sources import MixedRow, Source
from tasks.prepare import control_settings
from tasks.rl.rewards import EXACT_MATCH

PEEK = 1000
"""Rows that are read: enough to see all columns of a source with mixed rows."""


def problems(context: Context) -> Iterator[Finding]:
    """Yield the problems of the data: files, columns and the first rows."""
    settings = context.settings
    data, tokens = settings["data"], control_settings(settings)
    if data["kind"] == "toy":
        for key in ("path", "eval_path", "name", "sources"):
            if data[key]:
                allowed = "the embedded tasks would be read instead"
                override = "data=jsonl|csv|parquet|hub, without data=toy"
                yield Finding(f"data.{key}", "set with data.kind=toy", allowed, override)
        return
    key = "name" if data["kind"] == "hub" else "path"
    if not (data[key] or data["sources"]):
        yield Finding(f"data.{key}", "nothing", "has to be given", f"data.{key}=<{key}>")
    kind = kind_for(context.objective, texts=names_texts(data))
    control = (
        Control(tokens["model_tokens"], data["control_tokens"], tokens["last_answer"])
        if tokens
        else Control()
    )
    answered = context.online and settings["reward"]["function"] == EXACT_MATCH
    if data["chat_template"] is not None:
        try:
            existing_file(data["chat_template"], key="data.chat_template")
        except DataError as error:
            yield _refused("data.chat_template", error)
    for key, path, section in _files(data):
        yield from readable(key, path, section, kind, control=control, answered=answered)


def readable(
    key: str,
    path: str,
    section: Mapping[str, Any],
    kind: Kind,
    *,
    control: Control | None = None,
    answered: bool = False,
) -> Iterator[Finding]:
    """Read the first rows of a file; a mistake in them is a finding.

    Args:
        section: section `data`, with what its source says.
        control: control tokens of the model; None looks for none.
        answered: True if a prompt needs an answer.
    """
    columns = Columns.of({k: v for k, v in section.items() if k.endswith("_key")})
    source = Source(path, lambda: read_rows(section["kind"], path), columns)
    reading, bad = Reading(source, kind, answered, control or Control()), BadRows()
    try:
        existing_file(path, key=key)
        for row in itertools.islice(source.rows(), PEEK):
            try:
                reading.look(MixedRow(0, row, again=False))
            except Unusable as reason:
                bad.add(row.place, str(reason))
        reading.require_columns()
        if not reading.rows:
            raise DataError(f"{path} has no rows")
        if section["on_bad_line"] == "fail":
            bad.raise_if_any(read=reading.rows)
    except DataError as error:
        yield _refused(key, error)
    if reading.controlled:
        value = f"{reading.controlled} of the first {reading.rows} rows with control tokens"
        override = "data.control_tokens=escape, refuse or keep"
        yield Finding(key, value, f"first {reading.first_controlled}", override, "warning")


def _files(data: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield the setting of every data file, its path, and the section that says how to read it."""
    for number, source in enumerate(data["sources"]):
        named = {k: v for k, v in source.items() if v is not None and k.endswith(("_key", "kind"))}
        section = {**data, **named}
        if section["kind"] in FILE_KINDS:
            yield f"data.sources[{number}].path", source["path"], section
    for key in ("path", "eval_path"):
        if data[key] and data["kind"] in FILE_KINDS and not (key == "path" and data["sources"]):
            yield f"data.{key}", str(Path(data[key]).expanduser()), data


def _refused(key: str, error: DataError) -> Finding:
    """Return an error of the readers as a finding."""
    lines = "; ".join(error.details[:1])
    return Finding(
        key, error.message.removeprefix(f"{key}="), lines or "a readable file",
        error.hint or f"{key}=<file>",
    )  # fmt: skip
