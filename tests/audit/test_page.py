"""Consistency of the catalogue and its page, docs/findings.md."""

from __future__ import annotations

import re
from pathlib import Path

from tasks.audit.catalogue import CATALOGUE, SECTIONS
from tasks.audit.finding import Section
from tasks.audit.page import page

PROJECT = Path(__file__).resolve().parents[2]


def test_the_page_is_up_to_date() -> None:
    written = (PROJECT / "docs" / "findings.md").read_text()
    assert written == page(), "python -m tasks.audit.page > docs/findings.md"


def test_every_section_is_on_the_page_and_every_code_occurs_once() -> None:
    assert set(Section.__subclasses__()) == set(SECTIONS)
    assert sum(len(section.entries()) for section in SECTIONS) == len(CATALOGUE)
    assert all(re.fullmatch(r"[A-Z][A-Z0-9_]{3,27}", code) for code in CATALOGUE)


def test_every_code_is_used_by_a_check() -> None:
    root = PROJECT / "tasks" / "audit"
    checks = [*root.glob("*.py"), *(root / "checks").rglob("*.py")]
    words = {word for path in checks for word in re.findall(r"\w+", path.read_text())}
    assert [code for code in CATALOGUE if code not in words] == []


def test_an_entry_is_complete() -> None:
    for entry in CATALOGUE.values():
        assert entry.title, entry.code
        assert entry.why, entry.code
        assert entry.fix, entry.code
        assert not (entry.title + entry.why + entry.fix).endswith("."), entry.code
        assert all(re.fullmatch(r"[\w.-]+( PR)? #\d+", issue) for issue in entry.issues), entry.code
