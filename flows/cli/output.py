"""Paths of a command: folders as typed, and the file of a report (`out=`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.core.errors import ConfigError, Finding
from tasks.core.files import meant, open_up
from tasks.core.report import Report
from tasks.core.terminal import typed


def folder(text: str) -> Path:
    """Return the absolute path of a folder or file that a user typed."""
    return Path(text).expanduser().absolute()


def no_folder(key: str, text: str) -> Iterator[Finding]:
    """Yield a finding unless a setting names a folder that exists."""
    path = folder(text)
    if not path.is_dir():
        what = "a file" if path.is_file() else "no such folder"
        yield Finding(key, text, what, typed(key, meant(path) or "<folder>"))


def inside(settings: Mapping[str, Any], *keys: str) -> Iterator[Finding]:
    """Yield a finding if `out` has no folder, or lies in one of `keys`, which are only read."""
    out = settings["out"]
    if out in (None, "-"):
        return
    if not folder(out).parent.is_dir():
        yield Finding("out", out, "its folder does not exist", "out=<a file in a folder>")
    for key in keys:
        if settings[key] and folder(out).resolve().is_relative_to(folder(settings[key]).resolve()):
            yield Finding("out", out, f"{key} is only read", "out=<a file elsewhere>")


def show(report: Report, out: str | None) -> None:
    """Print a report, and write it to `out` in the form of its ending; `-` prints JSON.

    Raises ConfigError if the file cannot be written.
    """
    print(report.text() if out != "-" else report.form("-"))
    if out in (None, "-"):
        return
    try:
        folder(out).write_text(report.form(out))
        open_up(folder(out))
    except OSError as error:
        raise ConfigError(f"out={out}: {error.strerror}", hint="out=<a file elsewhere>") from error
