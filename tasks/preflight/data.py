"""The data file and its first rows. What is wrong further down is `prepare`'s to report."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.data.readers import existing_file, read_rows
from tasks.errors import DataError
from tasks.preflight.finding import Finding

PEEK = 20
"""Rows that are looked at; a source of mixed rows shows its columns within as many."""


def readable(settings: Mapping[str, Any]) -> list[Finding]:
    """A source that is not named, is not readable, or whose first rows lack the columns."""
    kind = settings["kind"]
    found = _template(settings["chat_template"])
    if kind == "toy":
        return found
    if kind == "hub":
        missing = Finding("data.name", "nothing", "has to be given", "data.name=owner/name")
        return found if settings["name"] else [*found, missing]
    if not settings["path"]:
        missing = Finding("data.path", "nothing", "has to be given", "data.path=<file>")
        return [*found, missing]
    for key in ("path", "eval_path"):
        if settings[key]:
            found += _source(key, settings)
    return found


def _template(path: str | None) -> list[Finding]:
    if path is None:
        return []
    try:
        existing_file(path, key="data.chat_template")
    except DataError as error:
        return [_refused("data.chat_template", error)]
    return []


def _source(key: str, settings: Mapping[str, Any]) -> list[Finding]:
    """One file: there, readable, not empty, with the columns that are asked for."""
    try:
        existing_file(settings[key], key=f"data.{key}")
        rows = list(itertools.islice(read_rows(settings["kind"], settings[key]), PEEK))
    except DataError as error:
        return [_refused(f"data.{key}", error)]
    if not rows:
        return [Finding(f"data.{key}", f"{settings[key]} has no rows", "a file with rows",
                        f"data.{key}=<file>")]  # fmt: skip
    columns = list(dict.fromkeys(name for row in rows for name in row.values))
    if not columns:  # not one of them can be read
        wrong = f"{rows[0].place}: {rows[0].problem}"
        allowed = f"{settings['kind']} as data.kind says"
        return [Finding(f"data.{key}", wrong, allowed, "data=jsonl|csv|parquet")]
    return wrong_columns(columns, settings, where=str(settings[key]))


def _refused(what: str, error: DataError) -> Finding:
    """What the readers say, as a finding."""
    message = error.message.removeprefix(f"{what}=")
    return Finding(what, message, "a readable file", error.hint or f"{what}=<file>")


def wrong_columns(
    columns: Sequence[str], settings: Mapping[str, Any], *, where: str
) -> list[Finding]:
    """A column of messages, or one of prompts and one of responses."""
    messages = settings["messages_key"]
    if messages in columns:
        return []
    wanted = [key for key in ("prompt_key", "response_key", "system_key") if settings[key]]
    missing = [key for key in wanted if settings[key] not in columns]
    near = _near(messages, columns, 0.6) if messages else None
    if missing and near:  # the other way out: messages under another name
        return [_column("messages_key", messages, near, columns, where)]
    return [
        _column(key, settings[key], _near(settings[key], columns, 0.4), columns, where)
        for key in missing
    ]


def _near(name: str, columns: Sequence[str], cutoff: float) -> str | None:
    return next(iter(difflib.get_close_matches(name, columns, n=1, cutoff=cutoff)), None)


def _column(key: str, name: str, near: str | None, columns: Sequence[str], where: str) -> Finding:
    allowed = f"the columns are {', '.join(columns) or 'none'}"
    override = f"data.{key}={near or '<column>'}"
    return Finding(f"data.{key}", f"no column {name!r} in {where}", allowed, override)
