"""Write `docs/findings.md` from the checks: `python -m tasks.audit.page > docs/findings.md`."""

from __future__ import annotations

import sys
from importlib import import_module
from itertools import groupby
from textwrap import wrap

import tasks.audit.checks  # noqa: F401 -- declares the codes
from tasks.audit.check import CHECKS, Check
from tasks.audit.source import commands

_WIDTH = 100
_HEAD = """# What `plumbline audit` finds

Made from `tasks/audit/checks/`; do not edit: `python -m tasks.audit.page > docs/findings.md`.

Codes are stable. An **error** means that a tool fails on the checkpoint, or that the model is not
the one that was trained. A **warning** means the same under a condition that it names. An **info**
is good to know. The severity of a single finding can differ from the one given here. Numbers are
public reports of the failure; "PR" is a pull request. [Failures that files do not
show](not-in-files.md) are listed apart.
"""
_COMMANDS = commands("DIR")


def page() -> str:
    """Return the text of `docs/findings.md`."""
    parts = [_HEAD]
    listed = [each for each in CHECKS if each.listed]
    for module, checks in groupby(listed, key=lambda each: each.module):
        title = (import_module(module).__doc__ or "").partition("\n")[0].removesuffix(".")
        parts += [f"## {title}\n", *map(_entry, checks)]
    return "\n".join(parts)


def _entry(each: Check) -> str:
    items = [f"- Why: {each.why}.", f"- Fix: {each.fix.format_map(_COMMANDS)}."]
    if each.issues:
        items.append(f"- Reported: {each.issues}.")
    title = f"{each.title}. *{each.severity.value.capitalize()}.*"
    return "\n".join([f"### {each.code}\n", f"{_wrapped(title)}\n", *map(_wrapped, items), ""])


def _wrapped(text: str) -> str:
    """Wrap at 100 characters, without breaking paths and options; list items are indented."""
    indent = "  " if text.startswith("- ") else ""
    text = text.replace(" #", "\u00a0#")  # keeps "project #number" on one line
    lines = wrap(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).replace("\u00a0", " ")


if __name__ == "__main__":
    sys.stdout.write(page())
