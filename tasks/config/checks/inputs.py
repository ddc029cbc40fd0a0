"""The user's own files: the audit of a base, and the first rows as `prepare_data` reads them."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tasks.config.checks.context import Context
from tasks.core.errors import DataError, EmptySplitError
from tasks.core.finding import Finding
from tasks.data.readers import FILE_KINDS
from tasks.delivery.examination import base_errors
from tasks.prepare import data_settings, prepare_data, source_identity

PEEK = 1000
"""Rows that are read: enough to see all columns of a source with mixed rows."""
_SILENT = logging.getLogger(f"{__name__}.silent")
_SILENT.disabled = True  # the stage itself logs what it leaves out


def problems(context: Context) -> Iterator[Finding]:
    """Yield the errors of a base in a local folder, and of local files of rows."""
    model, data = context.settings["model"], context.settings["data"]
    folder = Path(model["path"] or "").expanduser()
    if model["path"] and context.known.config and folder.is_dir():
        yield from _base(folder, str(source_identity(**model)))
    kinds = {source["kind"] or data["kind"] for source in data["sources"]} or {data["kind"]}
    if not kinds <= set(FILE_KINDS):
        return
    arguments = data_settings(context.settings)
    first = {**arguments, "max_samples": min(PEEK, arguments["max_samples"] or PEEK)}
    with tempfile.TemporaryDirectory() as out:
        try:
            try:
                prepare_data(Path(out), log=_SILENT, **first)
            except EmptySplitError:  # the first rows may all be equal
                prepare_data(Path(out), log=_SILENT, **arguments)
        except DataError as error:
            allowed = error.details[0] if error.details else "rows that can be read"
            yield Finding("data", error.message, allowed, error.hint or "data.path=<file>")


@cache  # the steps of a chain begin with the same base
def _base(folder: Path, _: str) -> list[Finding]:
    report = base_errors(folder)
    texts = ((f"{error.code} {error.where}: {error.found}", error.why) for error in report.findings)
    return [Finding("model.path", *text, report.command) for text in texts]
