"""Permissions of what the program writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.core.private import UMASK, open_up, stay_private


@pytest.fixture(autouse=True)
def umask(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start with a usual umask, and restore that of the tests."""
    monkeypatch.delenv(UMASK, raising=False)
    before = os.umask(0o022)
    yield
    os.umask(before)
    os.environ.pop(UMASK, None)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_files_are_the_owners_until_they_are_opened_up(tmp_path: Path) -> None:
    stay_private()
    stay_private()  # a second call must not take our umask for that of the user
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "file").touch()
    assert (mode(folder), mode(folder / "file")) == (0o700, 0o600)
    open_up(folder)
    assert (mode(folder), mode(folder / "file")) == (0o755, 0o644)
