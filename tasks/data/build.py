"""Rows -> the `dataset` artifact: `train.jsonl`, `heldout.jsonl`, and an account of every row.

Written as a stream. What stays in memory is one number a kept row, to tell duplicates.

The account in `dataset.json` adds up for each split: read = kept + refused + overlapping.
`overlapping` rows are training rows whose exact text is also held out; they are left out, since
testing on them would say nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tasks.data.conversations import (
    Columns,
    Message,
    Unusable,
    content_id,
    conversation,
    wrong_columns,
)
from tasks.data.findings import Findings
from tasks.data.readers import Row
from tasks.errors import DataError

Log = logging.Logger | logging.LoggerAdapter[Any]
TRAIN, HELD_OUT = "train", "heldout"
MOST_COLUMNS_NOTED = 50


@dataclass
class Split:
    """One output file and its account."""

    file: IO[str]
    read: int = 0
    kept: int = 0
    refused: int = 0
    overlapping: int = 0
    seen: dict[str, int] = field(default_factory=dict)

    def write(self, identity: str, messages: list[Message]) -> None:
        """Append one conversation; a repeated one gets a numbered id.

        The file is ASCII, so that no reader takes a line separator within a text for a new line.
        """
        repeat = self.seen.get(identity, 0)
        self.seen[identity] = repeat + 1
        row_id = f"{identity}-{repeat}" if repeat else identity
        row = {"id": row_id, "messages": messages}
        self.file.write(json.dumps(row) + "\n")
        self.kept += 1

    def counts(self) -> dict[str, int]:
        """The account. Nothing is truncated here: that needs the model's tokenizer."""
        return {
            "read": self.read,
            "kept": self.kept,
            "truncated": 0,
            "refused": self.refused,
            "overlapping": self.overlapping,
        }


@dataclass
class Reading:
    """What reading one source found out, beside its conversations."""

    source: str
    columns: Columns
    findings: Findings
    names: set[str] = field(default_factory=set)
    fitted: bool = False
    rows: int = 0

    def good(self, rows: Iterable[Row], split: Split) -> Iterator[tuple[str, list[Message]]]:
        """The usable rows as (identity, messages); the others are counted as refused."""
        for row in rows:
            split.read += 1
            self.rows += 1
            if len(self.names) < MOST_COLUMNS_NOTED:
                self.names.update(row.values)
            self.fitted = self.fitted or self.columns.fit(row.values)
            try:
                if row.problem:
                    raise Unusable(row.problem)
                messages = conversation(row.values, self.columns)
            except Unusable as reason:
                split.refused += 1
                self.findings.add(row.place, str(reason))
                continue
            yield content_id(messages), messages
        if self.names and not self.fitted:
            raise wrong_columns(self.names, self.columns, self.source)


def build_dataset(
    out: Path,
    *,
    train: Iterable[Row],
    held_out: Iterable[Row] | None,
    sources: tuple[str, str],
    columns: Columns,
    eval_fraction: float,
    seed: int,
    max_samples: int | None,
    on_bad_line: str,
    log: Log,
) -> dict[str, Any]:
    """Write the two splits into `out` and return what belongs into `dataset.json`.

    Args:
        out: existing directory.
        train: rows to train on.
        held_out: rows to test on; None takes `eval_fraction` of the training rows instead, chosen
            by a hash of their text, so that exact duplicates fall on the same side.
        sources: names of the two sources, for messages.
        columns: where the conversation stands in a row.
        eval_fraction: share of distinct conversations to hold out, in (0, 1).
        seed: chooses which ones.
        max_samples: read that many rows of `train` at most.
        on_bad_line: "fail" raises one error that lists the bad rows, "skip" counts them.
        log: told about skipped rows and unused columns.

    Raises:
        DataError: bad rows, wrong columns, an empty split.
    """
    _check_options(eval_fraction, max_samples, on_bad_line)
    findings = Findings()
    readings = [Reading(source, columns, findings) for source in sources]
    with ExitStack() as stack:
        files = [
            stack.enter_context((out / f"{name}.jsonl").open("w", encoding="ascii", newline="\n"))
            for name in (TRAIN, HELD_OUT)
        ]
        splits = {TRAIN: Split(files[0]), HELD_OUT: Split(files[1])}
        if held_out is not None:
            for identity, messages in readings[1].good(held_out, splits[HELD_OUT]):
                splits[HELD_OUT].write(identity, messages)
        fraction = 0.0 if held_out is not None else eval_fraction
        rows = itertools.islice(train, max_samples)
        _divide(readings[0], rows, splits, fraction=fraction, seed=seed)
    if on_bad_line == "fail":
        findings.raise_if_any(read=sum(reading.rows for reading in readings))
    if held_out is None and not splits[HELD_OUT].kept:
        _move_one(out, splits, seed=seed)
    _refuse_empty(splits, sources, findings)
    unused = sorted(set().union(*(reading.names for reading in readings)) - columns.used())
    _tell(findings, unused, log)
    return {
        "format": 1,
        "splits": {name: split.counts() for name, split in splits.items()},
        "refused_examples": findings.lines(),
        "unused_columns": unused,
    }


def _divide(
    reading: Reading,
    rows: Iterable[Row],
    splits: dict[str, Split],
    *,
    fraction: float,
    seed: int,
) -> None:
    """Send each usable training row to its side."""
    train, held = splits[TRAIN], splits[HELD_OUT]
    for identity, messages in reading.good(rows, train):
        if _position(identity, seed) < fraction:
            train.read -= 1
            held.read += 1
            held.write(identity, messages)
        elif identity in held.seen:
            train.overlapping += 1
        else:
            train.write(identity, messages)


def _position(identity: str, seed: int) -> float:
    """Where a conversation falls in [0, 1), evenly spread and the same on every machine."""
    digest = hashlib.sha256(f"{seed} {identity}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _move_one(out: Path, splits: dict[str, Split], *, seed: int) -> None:
    """Hold out the conversation nearest to the line, where a small source left none beyond it."""
    train, held = splits[TRAIN], splits[HELD_OUT]
    if len(train.seen) < 2:
        return
    chosen = min(train.seen, key=lambda identity: _position(identity, seed))
    path = out / f"{TRAIN}.jsonl"
    lines = path.read_text(encoding="ascii").splitlines(keepends=True)
    moved = [line for line in lines if json.loads(line)["id"].partition("-")[0] == chosen]
    stay = [line for line in lines if json.loads(line)["id"].partition("-")[0] != chosen]
    path.write_text("".join(stay), encoding="ascii", newline="\n")
    held_path = out / f"{HELD_OUT}.jsonl"
    held_path.write_text("".join(moved), encoding="ascii", newline="\n")
    for split, change in ((train, -len(moved)), (held, len(moved))):
        split.read += change
        split.kept += change


def _check_options(eval_fraction: float, max_samples: int | None, on_bad_line: str) -> None:
    if not 0.0 < eval_fraction < 1.0:
        raise DataError(
            f"data.eval_fraction={eval_fraction} is not between 0 and 1",
            hint="data.eval_fraction=0.05, or data.eval_path=<file>",
        )
    if max_samples is not None and max_samples < 1:
        raise DataError(
            f"data.max_samples={max_samples} keeps nothing", hint="data.max_samples=null"
        )
    if on_bad_line not in ("fail", "skip"):
        raise DataError(
            f"data.on_bad_line={on_bad_line} is not known", hint="data.on_bad_line=fail or skip"
        )


def _refuse_empty(splits: dict[str, Split], sources: tuple[str, str], found: Findings) -> None:
    for (name, split), source in zip(splits.items(), sources, strict=True):
        if split.kept:
            continue
        counts = f"{split.read} rows read, {split.refused} refused"
        if split.overlapping:
            counts += f", {split.overlapping} also held out"
        hint = "data.path=<file with rows>"
        if name == HELD_OUT:
            hint = "data.eval_path=<file with rows>, or at least two different conversations"
        raise DataError(
            f"{source}: the {name} split is empty: {counts}", details=found.lines(), hint=hint
        )


def _tell(findings: Findings, unused: list[str], log: Log) -> None:
    if findings.total:
        log.warning("%d rows refused, counted and left out:", findings.total)
        for line in findings.lines():
            log.warning("  %s", line)
    if unused:
        log.info("columns that are not used: %s", ", ".join(unused))
