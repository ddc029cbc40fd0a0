"""Rows of a report, and their forms: a table for terminals, JUnit, Markdown.

rows = [Row("distribution", "fault", "another model", causes=[Cause("base-served", ..., ...)])]
print("\n".join(table(rows)))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any, Literal
from xml.etree import ElementTree

from tasks.core.terminal import plain

Verdict = Literal["ok", "fault", "unknown"]
WIDTH = 100
_NAMES = 15
"""Least width of the column of codes."""
_WRAP: Mapping[str, Any] = {"break_on_hyphens": False}


@dataclass(frozen=True)
class Cause:
    """Likely cause of a fault: its code, the numbers that speak for it, and what to type."""

    code: str
    text: str
    hint: str


@dataclass(frozen=True)
class Row:
    """One line of a report.

    Attributes:
        code: name of the check or finding.
        verdict: "unknown" if nothing could be proven, which never counts as ok.
        text: one sentence for a person.
        measured: numbers and names by key, e.g. `mean_kl`.
        causes: likely causes of a fault, the likeliest first.
        limit: the limit of each number that has one, by the same key.
    """

    code: str
    verdict: Verdict
    text: str
    measured: Mapping[str, float | str] = field(default_factory=dict)
    causes: Sequence[Cause] = ()
    limit: Mapping[str, float] = field(default_factory=dict)


def faults(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that are faults."""
    return [row for row in rows if row.verdict == "fault"]


def causes(rows: Sequence[Row]) -> list[Cause]:
    """Return the causes of all faults, each code once, in the order of the rows."""
    by_code: dict[str, Cause] = {}
    for row in faults(rows):
        for cause in row.causes:
            by_code.setdefault(cause.code, cause)
    return list(by_code.values())


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table, faults first; a shared cause is explained once."""
    names = max([_NAMES, *(len(row.code) for row in rows)])
    indent = " " * (names + 10)
    lines = [f"{'check':<{names}} {'verdict':<8} measured", "-" * WIDTH]
    explained: set[str] = set()
    for row in [*faults(rows), *(row for row in rows if row.verdict != "fault")]:
        first = f"{row.code:<{names}} {_word(row):<8} "
        for line in _details(row, explained):
            lines += wrap(line, WIDTH, initial_indent=first, subsequent_indent=indent, **_WRAP)
            first = indent
    return [*lines, "-" * WIDTH]


def folded(lines: Sequence[str]) -> str:
    """Return lines as text for a terminal, none wider than `WIDTH`."""
    parts = (wrap(line, WIDTH, subsequent_indent="  ", **_WRAP) or [""] for line in lines)
    return plain("\n".join(part for folds in parts for part in folds))


def junit(suite: str, group: str, rows: Sequence[Row], seconds: float, error: str = "") -> str:
    """Return JUnit XML: one test case for each row, "unknown" as skipped.

    Args:
        seconds: wall-clock time.
        error: a verdict that is neither a success nor in a row: a test case of its own.
    """
    skipped = sum(row.verdict == "unknown" for row in rows)
    counts = {"tests": len(rows) + bool(error), "failures": len(faults(rows))}
    counts |= {"errors": int(bool(error)), "skipped": skipped}
    top = ElementTree.Element(
        "testsuite",
        {"name": suite, **{key: str(n) for key, n in counts.items()}, "time": f"{seconds:.3f}"},
    )

    def case(name: str) -> ElementTree.Element:
        return ElementTree.SubElement(
            top, "testcase", {"classname": plain(group), "name": plain(name)}
        )

    for row in rows:
        element, message = case(row.code), plain(row.text)
        if row.verdict == "unknown":
            ElementTree.SubElement(element, "skipped", {"message": message})
        if row.verdict == "fault":
            codes = ", ".join(cause.code for cause in row.causes) or row.code
            about = {"message": message, "type": codes}
            failure = ElementTree.SubElement(element, "failure", about)
            failure.text = plain("\n".join(_details(row, set())))
    if error:
        ElementTree.SubElement(case("verdict"), "error", {"message": plain(error)})
    ElementTree.indent(top)
    return ElementTree.tostring(top, encoding="unicode", xml_declaration=True) + "\n"


def markdown(line: str, rows: Sequence[Row]) -> str:
    """Return Markdown for pages of orchestrators and trackers: a verdict and a table."""
    lines = [_cell(line), "", "| check | verdict | measured | cause |", "|---|---|---|---|"]
    for row in rows:
        codes = ", ".join(cause.code for cause in row.causes)
        lines.append(f"| {row.code} | {_word(row)} | {_cell(row.text)} | {codes} |")
    for cause in causes(rows):
        lines += ["", f"{cause.code}: {_cell(cause.text)}", f"- fix: {_cell(cause.hint)}"]
    return "\n".join(lines) + "\n"


def _word(row: Row) -> str:
    return "FAULT" if row.verdict == "fault" else row.verdict


def _details(row: Row, explained: set[str]) -> Iterator[str]:
    """Yield the text, what was measured against its limits, the causes, and what to type.

    `explained` has the codes of causes that need no explanation any more; it grows.
    """
    yield row.text
    limits = ", ".join(
        f"{name.replace('_', ' ')}: {_number(row.measured[name])} (limit {_number(limit)})"
        for name, limit in row.limit.items()
        if name in row.measured
    )
    if limits:
        yield limits
    for cause in row.causes:
        if cause.code in explained:
            yield f"cause: as above [{cause.code}]"
            continue
        explained.add(cause.code)
        yield f"cause: {cause.text} [{cause.code}]"
        yield f"-> {cause.hint}"


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"


def _cell(text: str) -> str:
    """Return text that may come from a server for a cell of a Markdown table, as code."""
    return f"`{plain(text).replace('`', chr(39)).replace('|', '/')}`"
