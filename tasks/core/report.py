"""One writer for the reports of audit, verify, bisect and the gate.

class Report(core.report.Report):    head, rows, line, tail, as_json
report.text()                        for a terminal: the failed rows first
report.form("report.xml")            JUnit; `.md` Markdown, `.txt` text, else JSON
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import Any, ClassVar
from xml.etree import ElementTree

from tasks.core.terminal import json_text, plain

_WIDTH, _CODE = 100, 15
"""Characters of a line, and of the column of codes."""
_FAILED = ("error", "fault", "failed", "differs")


def fold(line: str, first: str = "", indent: str = "  ") -> list[str]:
    """Return a line as lines of the report's width; words are not broken."""
    return wrap(
        line, _WIDTH, initial_indent=first, subsequent_indent=indent, break_long_words=False,
        break_on_hyphens=False
    )  # fmt: skip


@dataclass(frozen=True)
class Cause:
    """Likely cause of a fault: its code, the numbers that speak for it, and what to type."""

    code: str
    text: str
    hint: str


@dataclass(frozen=True)
class Row:
    """One judged thing: a finding, a check, a module, a condition."""

    code: str
    verdict: str  # one of `_FAILED` fails the report; "unknown" proves nothing
    text: str
    measured: Mapping[str, float | str] = field(default_factory=dict)
    causes: Sequence[Cause] = ()  # the likeliest first
    limit: Mapping[str, float] = field(default_factory=dict)  # of numbers, by the same key
    details: Sequence[str] = ()  # lines below the text, as they are: commands can be copied

    @property
    def failed(self) -> bool:
        """True if it fails the report."""
        return self.verdict in _FAILED


@dataclass(frozen=True)
class Page:
    """Content of a report: lines, rows, the verdict in one line, lines."""

    head: Sequence[str]
    rows: Sequence[Row]
    line: str
    tail: Sequence[str] = ()
    proves: bool = True  # False: neither a success nor a failure
    subject: str = ""  # model or folder that it is about
    seconds: float = 0.0  # that it took; 0 if that was not measured


class Report:
    """Base of a report: its forms for people and for programs."""

    command: ClassVar[str]

    def page(self) -> Page:
        """Return what it says."""
        raise NotImplementedError

    def as_json(self) -> dict[str, Any]:
        """Return a dict of plain JSON values."""
        raise NotImplementedError

    def form(self, name: str) -> str:
        """Return the report in the form that the ending of a file's name asks for."""
        forms = {".xml": self.junit, ".md": self.markdown, ".txt": self.text}
        return forms.get(Path(name).suffix, lambda: json_text(self.as_json()))().rstrip() + "\n"

    def text(self) -> str:
        """Return the report for a terminal."""
        page, explained = self.page(), set[str]()
        lines = list(page.head)
        for number, row in enumerate(sorted(page.rows, key=lambda row: not row.failed)):
            below = list(_below(row, explained))
            word = row.verdict.upper() if row.verdict == "fault" else row.verdict
            lines += [""] if lines and (not number or below) else []
            lines += fold(f"{word:<8} {row.code:<{_CODE}}  {row.text}", "", " " * (_CODE + 11))
            lines += below
        return plain("\n".join([*lines, "", *fold(page.line), *page.tail]))

    def markdown(self) -> str:
        """Return the text as a block of code, for pages of orchestrators and trackers."""
        return f"```text\n{self.text().replace('```', chr(39) * 3)}\n```\n"

    def junit(self) -> str:
        """Return JUnit XML: one test case for each row, "unknown" as skipped.

        A program that counts failures must not take a report that proves nothing for a success.
        """
        page = self.page()
        cases = [*page.rows]
        if not page.proves or not cases:
            cases.append(Row("verdict", "ok" if page.proves else "unproven", page.line))
        kinds = ["failure" if row.failed else _KINDS.get(row.verdict, "") for row in cases]
        top = ElementTree.Element("testsuite", name=f"plumbline {self.command}")
        for word, kind in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            top.set(word, str(kinds.count(kind)))
        top.set("tests", str(len(cases)))
        if page.seconds:
            top.set("time", f"{page.seconds:.3f}")
        name = plain(f"{self.command}.{page.subject}" if page.subject else self.command)
        for row, kind in zip(cases, kinds, strict=True):
            about = {"classname": name, "name": plain(row.code)}
            case = ElementTree.SubElement(top, "testcase", about)
            about = {"message": plain(row.text)} if kind else {}
            if kind == "failure":
                about["type"] = ", ".join(cause.code for cause in row.causes) or row.code
            if kind or row.details:
                inner = ElementTree.SubElement(case, kind or "system-out", about)
                inner.text = plain("\n".join([row.text, *_below(row, set())]))
        ElementTree.indent(top)
        return ElementTree.tostring(top, encoding="unicode", xml_declaration=True)


_KINDS = {"unknown": "skipped", "unproven": "error"}


def _below(row: Row, explained: set[str]) -> Iterator[str]:
    """Yield the details, and the causes that are not `explained` yet with what to type."""
    yield from (f"  {line}" for line in row.details)
    for cause in row.causes:
        mark = f" [{cause.code}]" if cause.code else ""
        if mark in explained:
            yield f"  cause: as above{mark}"
            continue
        explained |= {mark} - {""}
        yield from fold(f"cause: {cause.text}{mark}", "  ", "    ")
        if cause.hint:
            yield f"  -> {cause.hint}"
