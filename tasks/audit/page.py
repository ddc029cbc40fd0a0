"""`docs/findings.md`, made from the catalogue: `python -m tasks.audit.page > docs/findings.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from tasks.audit.catalogue import PAGES, entries
from tasks.audit.catalogue.entry import Entry, Unseen
from tasks.audit.catalogue.unseen import UNSEEN

_HEAD = """# What `flows/audit.py` finds

Made from `tasks/audit/catalogue/`; do not edit: `python -m tasks.audit.page > docs/findings.md`.

Codes are stable. An **error** is something that a tool will fail on, or a model that is not the one
that was trained; a **warning** is one under a condition that is named; an **info** is good to know.
A case may be more or less severe than its code usually is. Numbers are public reports of the
failure; "PR" is a pull request.
"""

_UNSEEN = """## What no look at files can find

Reported failures that leave nothing behind in the files, or files that are as good as any other.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for module in PAGES:
        heading = (module.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        parts += [f"## {heading}\n", *map(_entry, entries(module))]
    return "\n".join([*parts, _UNSEEN, *_unseen(UNSEEN), ""])


def _entry(entry: Entry) -> str:
    lines = [
        f"### {entry.code}\n",
        f"{entry.title}. *{entry.severity.value.capitalize()}.*\n",
        f"- Why: {entry.why}.",
        f"- Fix: {entry.fix}.",
    ]
    if entry.issues:
        lines.append(f"- Reported: {', '.join(entry.issues)}.")
    return "\n".join(lines) + "\n"


def _unseen(all_of_them: Iterable[Unseen]) -> Iterator[str]:
    yield "| reported | what | why files do not show it |\n|---|---|---|"
    for one in all_of_them:
        yield f"| {', '.join(one.issues)} | {one.what} | {one.reason} |"


if __name__ == "__main__":
    sys.stdout.write(page())
