"""The catalogue, and the page that is made from it."""

from __future__ import annotations

import re
from pathlib import Path

from tasks.audit.catalogue import CATALOGUE, PAGES, entries
from tasks.audit.page import page

PROJECT = Path(__file__).resolve().parents[2]


def test_the_page_is_up_to_date() -> None:
    written = (PROJECT / "docs" / "findings.md").read_text()
    assert written == page(), "python -m tasks.audit.page > docs/findings.md"


def test_a_code_is_the_name_of_its_entry_and_there_once() -> None:
    names = [
        name for module in PAGES for name, one in vars(module).items() if one in [*entries(module)]
    ]
    assert names == list(CATALOGUE)
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Z][A-Z0-9_]{3,27}", code) for code in names)


def test_every_code_is_used_by_a_family() -> None:
    root = PROJECT / "tasks" / "audit"
    families = [*root.glob("*.py"), *(root / "checks").rglob("*.py")]
    words = {one for path in families for one in re.findall(r"\w+", path.read_text())}
    assert [code for code in CATALOGUE if code not in words] == []


def test_an_entry_says_everything() -> None:
    for one in CATALOGUE.values():
        assert one.title, one.code
        assert one.why, one.code
        assert one.fix, one.code
        assert not (one.title + one.why + one.fix).endswith("."), one.code
        assert all(re.fullmatch(r"[\w.-]+( PR)? #\d+", issue) for issue in one.issues), one.code
