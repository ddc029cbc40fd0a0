"""Write the page of findings from the checks; `make docs` puts it into the site."""

from __future__ import annotations

import sys
from importlib import import_module
from itertools import groupby

import tasks.audit.checks  # noqa: F401 -- declares the codes
from tasks.audit.check import CHECKS, Check
from tasks.audit.source import commands

_HEAD = """# What `plumbline audit` finds

Codes are stable. An error means that a tool fails on the checkpoint, or that the model is not the
one that was trained; a warning the same under a condition; an info is good to know.
Failures that leave nothing in files (crashes, servers, wrong data) are for `deliver`, `verify` and
the evaluation.
"""


def page() -> str:
    """Return the text of the page."""
    listed = (each for each in CHECKS if each.listed)
    parts = [_HEAD]
    for module, checks in groupby(listed, key=lambda each: each.module):
        title = (import_module(module).__doc__ or "").partition("\n")[0].partition(":")[0]
        parts += [f"## {title.removesuffix('.')}\n", *map(_entry, checks), ""]
    return "\n".join(parts)


def _entry(each: Check) -> str:
    """Return a list item: code, severity, title, reason, fix and public reports."""
    fix = each.fix.format_map({name: f"`{text}`" for name, text in commands("DIR").items()})
    issues = f" ({each.issues})" if each.issues else ""
    title = f"{each.title}: {each.why}. To fix it: {fix}."
    return f"- **{each.code}** ({each.severity.value}): {title}{issues}"


if __name__ == "__main__":
    sys.stdout.write(page())
