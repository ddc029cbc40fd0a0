"""Paths of a command: folders as typed, and the file of a report (`out=`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.core.errors import ConfigError
from tasks.core.files import meant
from tasks.core.finding import Finding
from tasks.core.private import open_up
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
    """Yield a finding if `out` lies in a folder of the settings `keys`, which are only read."""
    out = settings["out"]
    for key in keys if out not in (None, "-") else ():
        if settings[key] and folder(out).resolve().is_relative_to(folder(settings[key]).resolve()):
            yield Finding("out", out, f"{key} is only read", "out=<a file elsewhere>")


def write_report(out: str, text: str) -> None:
    """Write a report to the file that a user named. Raises ConfigError if it cannot be written."""
    try:
        folder(out).write_text(text)
        open_up(folder(out))
    except OSError as error:
        raise ConfigError(f"out={out}: {error.strerror}", hint="out=<a file elsewhere>") from error
