"""Write `docs/findings.md` from the catalogue: `python -m tasks.audit.page > docs/findings.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from textwrap import wrap

from tasks.audit.catalogue import SECTIONS
from tasks.audit.catalogue.unseen import UNSEEN, Unseen
from tasks.audit.finding import Entry

_WIDTH = 100
_HEAD = """# What `flows/audit.py` finds

Made from `tasks/audit/catalogue/`; do not edit: `python -m tasks.audit.page > docs/findings.md`.

Codes are stable. An **error** means that a tool fails on the checkpoint, or that the model is not
the one that was trained. A **warning** means the same under a condition that it names. An **info**
is good to know. The severity of a single finding can differ from the one given here. Numbers are
public reports of the failure; "PR" is a pull request.
"""

_UNSEEN = """## Failures that files do not show

Reported failures that leave nothing in the files, or files that are as valid as any other.
"""


def page() -> str:
    """Return the text of `docs/findings.md`."""
    parts = [_HEAD]
    for section in SECTIONS:
        parts += [f"## {section.heading}\n", *map(_entry, section.entries())]
    return "\n".join([*parts, _UNSEEN, *_unseen(UNSEEN), ""])


def _entry(entry: Entry) -> str:
    items = [f"- Why: {entry.why}.", f"- Fix: {entry.fix}."]
    if entry.reported:
        items.append(f"- Reported: {entry.reported}.")
    title = f"{entry.title}. *{entry.severity.value.capitalize()}.*"
    return "\n".join([f"### {entry.code}\n", f"{_wrapped(title)}\n", *map(_wrapped, items), ""])


def _wrapped(text: str) -> str:
    """Wrap at 100 characters, without breaking paths and options; list items are indented."""
    indent = "  " if text.startswith("- ") else ""
    text = text.replace(" #", "\u00a0#")  # keeps "project #number" on one line
    lines = wrap(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).replace("\u00a0", " ")


def _unseen(failures: Iterable[Unseen]) -> Iterator[str]:
    yield "| reported | what | why files do not show it |\n|---|---|---|"
    for failure in failures:
        yield f"| {', '.join(failure.issues)} | {failure.what} | {failure.reason} |"


if __name__ == "__main__":
    sys.stdout.write(page())
