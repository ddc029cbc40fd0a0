"""Answers that replies are to be compared with: whether the first rows have any.

One row without an answer, further down, is `prepare`'s to report, with its line.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.config.checks.data import PEEK
from tasks.config.checks.finding import Finding
from tasks.core.errors import DataError
from tasks.data.asked import asked
from tasks.data.columns import Columns
from tasks.data.messages import Unusable
from tasks.data.readers import FILE_KINDS, Row, read_rows
from tasks.rl.algorithms import algorithm_options
from tasks.rl.rewards.exact import EXACT_MATCH


def answers(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """`reward.function=exact_match` over files none of whose first rows has an answer.

    Args:
        settings: the resolved configuration.
    """
    online = settings["train"]["objective"] in algorithm_options.USES
    if not online or settings["reward"]["function"] != EXACT_MATCH:
        return
    for path, section in _files(settings["data"]):
        columns = Columns.of({k: v for k, v in section.items() if k.endswith("_key")})
        try:
            rows = list(itertools.islice(read_rows(section["kind"], path), PEEK))
        except DataError:
            continue  # found elsewhere, as are rows that cannot be asked
        found = list(_have_answers(rows, columns))
        if found and not any(found):
            names = list(dict.fromkeys(name for row in rows for name in row.values))
            yield Finding(
                "reward.function",
                f"{EXACT_MATCH}, and none of the first {len(found)} rows of {path} has an answer",
                f"a column {columns.answer!r}, or a conversation that ends with the answer; "
                f"the columns are {', '.join(names)}",
                "data.answer_key=<column>, or reward.function=<path.py>:<name>",
            )


def _files(data: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Paths of all files that are read, and how."""
    for source in data["sources"]:
        named = {k: v for k, v in source.items() if v is not None and k.endswith(("_key", "kind"))}
        merged = {**data, **named}
        if merged["kind"] in FILE_KINDS and source["path"]:
            yield source["path"], merged
    if data["kind"] in FILE_KINDS:
        for key in ("path", "eval_path"):
            if data[key]:
                yield data[key], data


def _have_answers(rows: list[Row], columns: Columns) -> Iterator[bool]:
    for row in rows:
        try:
            if not row.problem:
                yield "answer" in asked(row.values, columns.among(row.values))
        except Unusable:
            continue
