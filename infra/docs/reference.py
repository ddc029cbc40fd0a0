"""Write the pages of the documentation that are made from code; `make docs` runs it.

mkdocs calls the two hooks at the end. What is generated lies in build/site only: commands with
their settings, experiments, numbers of the gate, and findings.
Pages that lie outside `docs/` (README.md, SECURITY.md and others) become pages of the site too.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))  # mkdocs imports this file by its path

from omegaconf import OmegaConf  # noqa: E402

import tasks.audit.checks  # noqa: E402, F401 -- declares the codes
from flows.cli import config, tool  # noqa: E402
from flows.cli.usage import experiment_line, full  # noqa: E402
from flows.cli.vocabulary import CONF, EXPERIMENTS, experiments  # noqa: E402
from tasks.audit.check import CHECKS, Check  # noqa: E402
from tasks.audit.source import commands as typed_commands  # noqa: E402
from tasks.release.gate import NUMBERS  # noqa: E402

OUTSIDE = {
    "README.md": "index.md",
    "README.zh-CN.md": "index.zh-CN.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "tasks/witness/README.md": "witness.md",
}
"""Files outside `docs/`, and their pages."""
_LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")


def commands() -> Iterator[str]:
    """Yield the lines of the page with the help of every command: exit statuses and settings."""
    yield "# Commands and settings"
    yield "\n`plumbline <command>` and `python flows/<command>.py` are the same; `train` is `rlhf`."
    yield "A setting is typed as `key=value`. What to do about an exit status:"
    yield "[runbook](../runbook.md#exit-statuses)."
    block = "\n## {}\n\n```text\n{}\n```"
    for program in config.SCHEMAS:
        values = config.composed_as_is([], program)
        yield block.format(program, full(config.vocabulary(program), values))
    for program in tool.TOOLS:
        names = tool.vocabulary(program)
        yield block.format(program, full(names, OmegaConf.create(names.defaults)))


def experiment_pages() -> Iterator[str]:
    """Yield the lines of the page with every file of `conf/exp`."""
    yield "# Experiments"
    for name in experiments(CONF):
        file = CONF / EXPERIMENTS / f"{name}.yaml"
        yield f"\n## {name}\n\n{experiment_line(file)}"
        yield f"\n```yaml\n{file.read_text(encoding='utf-8').rstrip()}\n```"


def numbers() -> Iterator[str]:
    """Yield the lines of the page with the numbers that a condition of the gate can name."""
    yield "# Numbers of the gate"
    yield "\nConditions on them: [training](../training.md#the-gate)."
    yield "\n" + _row("number", "metric in MLflow", "before training", "measured by")
    yield "|---|---|---|---|"
    for name, number in NUMBERS.items():
        before = f"`{number.base}`" if number.base else ""
        yield _row(f"`{name}`", f"`{number.key}`", before, ", ".join(number.kinds) or "all")


def findings() -> Iterator[str]:
    """Yield the lines of the page with everything that an audit finds."""
    yield "# What `plumbline audit` finds"
    yield "\nCodes are stable. An error means that a tool fails on the checkpoint, or that it is"
    yield "not what was trained; a warning the same under a condition; an info is good to know."
    yield "Failures that leave nothing in files (crashes) are for `deliver` and `verify`."
    fixes = {name: f"`{text}`" for name, text in typed_commands("DIR").items()}
    for module, checks in groupby(CHECKS, key=lambda each: each.module):
        title = (import_module(module).__doc__ or "").partition("\n")[0].partition(":")[0]
        yield f"\n## {title.removesuffix('.')}\n"
        yield from (_finding(each, each.fix.format_map(fixes)) for each in checks)


def _finding(each: Check, fix: str) -> str:
    """Return a list item: code, severity, title, reason, fix and public reports."""
    issues = f" ({each.issues})" if each.issues else ""
    text = f"{each.title}: {each.why}. To fix it: {fix}."
    return f"- **{each.code}** ({each.severity.value}): {text}{issues}"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


GENERATED: dict[str, Callable[[], Iterable[str]]] = {
    "reference/experiments.md": experiment_pages,
    "reference/numbers.md": numbers,
    "reference/commands.md": commands,
    "findings.md": findings,
}


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and those whose files lie outside `docs/`."""
    for page, lines in GENERATED.items():
        files.append(File.generated(config, page, content="\n".join(lines()) + "\n"))
    # Commands are up to 120 characters wide and wrap.
    wide = ".md-grid { max-width: 84rem }"
    wide += " .md-typeset .language-sh pre > code { white-space: pre-wrap }"
    files.append(File.generated(config, "stylesheets/wide.css", content=wide))
    for name, page in OUTSIDE.items():
        text = (PROJECT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links between files of the project to the pages of the site.

    A link to a file that has no page loses its address and keeps its text.
    """
    address = page.file.src_uri
    if address in GENERATED:
        return markdown
    sources = {target: source for source, target in OUTSIDE.items()}
    folder = PurePosixPath(sources.get(address, f"docs/{address}")).parent

    def rewritten(match: re.Match[str]) -> str:
        path = os.path.normpath(folder / match[1])
        if path in OUTSIDE:
            target = OUTSIDE[path]
        elif path.startswith("docs/"):
            target = path.removeprefix("docs/")
        else:
            return "]" if not (PROJECT / path).exists() else "]()"
        return f"]({os.path.relpath(target, PurePosixPath(address).parent)}{match[2] or ''})"

    linked = _LINK.sub(rewritten, markdown)
    return re.sub(r"\[([^\]]*)\]\(\)", r"\1", linked)
