"""Write the page of findings from the checks; `make docs` puts it into the site."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from itertools import groupby
from textwrap import wrap

import tasks.audit.checks  # noqa: F401 -- declares the codes
from tasks.audit.check import CHECKS, ERROR, Check
from tasks.audit.source import commands

_WIDTH = 100
_HEAD = """# What `plumbline audit` finds

Codes are stable. An error means that a tool fails on the checkpoint, or that the model is not the
one that was trained; a **warning** the same under a condition; an **info** is good to know. The
terminal adds the reason, the tool that fails, and commands with your folders. Failures that leave
nothing in files (crashes, servers, wrong data) are for `deliver`, `verify` and the evaluation.

Commands:
"""


def page() -> str:
    """Return the text of the page."""
    named = commands("DIR")
    names = {name: f"*{name}*" for name in named}
    parts = [""]
    for module, checks in groupby(
        (each for each in CHECKS if each.listed), key=lambda each: each.module
    ):
        title = (import_module(module).__doc__ or "").partition("\n")[0].partition(":")[0]
        parts += [f"## {title.removesuffix('.')}\n", *(_entry(each, names) for each in checks), ""]
    body = "\n".join(parts)
    used = [f"- *{name}*: `{text}`" for name, text in named.items() if f"*{name}*" in body]
    return "\n".join([_HEAD, *used, body])


def _entry(each: Check, names: dict[str, str]) -> str:
    """Return a list item: code, severity, title, and the first clause of the fix."""
    severity = "" if each.severity is ERROR else f" (**{each.severity.value}**)"
    fix = re.split(r"; |\. |, or |, which ", each.fix.format_map(names))[0]
    text = f"- **{each.code}**{severity}: {each.title}. {fix[0].upper()}{fix[1:]}."
    lines = wrap(
        text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(page())
