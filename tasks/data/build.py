"""Build the `dataset` artifact: `train.jsonl`, `heldout.jsonl`, and counts of all rows.

Rows are written as a stream. Memory holds one id for each kept row, to find duplicates.

The counts in `dataset.json` add up for each split: read = kept + refused + overlapping.
`overlapping` rows are training rows whose exact text is also held out. They are left out, so that
no model is evaluated on a text that it was trained on.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from tasks.core.errors import DataError, EmptySplitError
from tasks.data.control import WAYS, Control
from tasks.data.kinds import CONVERSATIONS, Kind, Payload, content_id, side_id
from tasks.data.messages import Unusable
from tasks.data.readers import ALL_EXHAUSTED, Row, Source, mix, wrong_probabilities

Log = logging.Logger | logging.LoggerAdapter[Any]
TRAIN, HELD_OUT = "train", "heldout"
SHOWN = 20
MOST_COLUMNS_NOTED = 50


@dataclass(frozen=True)
class Options:
    """Settings of a dataset."""

    kind: Kind = CONVERSATIONS
    # share of distinct rows to hold out, in (0, 1), if there is no source of held-out rows. A hash
    # of the text decides, so exact duplicates stay together
    eval_fraction: float = 0.05
    seed: int = 0  # seed of the held-out rows, and of the order of mixed sources
    # maximum number of rows to read from all training sources together
    max_samples: int | None = None
    on_bad_line: str = "fail"  # "fail" raises one error that lists the bad rows, "skip" counts them
    # end of mixing, "first_exhausted" or "all_exhausted"; see `readers.mix`
    stopping: str = ALL_EXHAUSTED
    answered: bool = False  # True if a prompt without an answer is a bad row
    control: Control = field(default_factory=Control)  # control tokens in the texts of rows


@dataclass
class Split:
    """One output file, and the counts of its rows."""

    file: IO[str]
    tested: bool
    read: int = 0
    kept: int = 0
    refused: int = 0
    overlapping: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    sides: set[str] = field(default_factory=set)

    def write(self, payload: Payload, side: str) -> None:
        """Append one row; a repeated row gets a numbered id.

        A held-out pair gets `messages`, so that the served model can be evaluated. The file is
        ASCII, so a Unicode line separator in a text cannot start a new line.
        """
        identity = content_id(payload)
        repeat = self.seen.get(identity, 0)
        self.seen[identity] = repeat + 1
        self.sides.add(side)
        if self.tested and "chosen" in payload:
            payload = {"messages": [*payload["prompt"], *payload["chosen"]], **payload}
        row_id = f"{identity}-{repeat}" if repeat else identity
        self.file.write(json.dumps({"id": row_id, **payload}) + "\n")
        self.kept += 1

    def counts(self) -> dict[str, int]:
        """Return the counts. The stage `train` cuts long rows later; it has the tokenizer."""
        return {n: getattr(self, n) for n in ("read", "kept", "refused", "overlapping")}


@dataclass
class BadRows:
    """Rows that cannot be used: their number, and the reasons of the first `SHOWN`."""

    total: int = 0
    shown: list[str] = field(default_factory=list)

    def add(self, place: str, problem: str) -> None:
        """Note one bad row. `place` is `file:line`."""
        self.total += 1
        if len(self.shown) < SHOWN:
            self.shown.append(f"{place}: {problem}")

    def lines(self) -> list[str]:
        """Return one line for each shown row, and a last line with the number of the others."""
        rest = self.total - len(self.shown)
        return [*self.shown, f"... and {rest} more"] if rest else list(self.shown)


@dataclass
class Reading:
    """Rows of one source: checked one by one, and counted."""

    source: Source
    options: Options
    names: set[str] = field(default_factory=set)  # names of its columns
    fitted: bool = False  # True if a row had the columns that its kind needs
    rows: int = 0
    refused: int = 0  # number of rows that cannot be used
    repeated: int = 0  # number of rows that were read again, in a mixture
    # places of rows with a control token outside answers
    controlled: list[str] = field(default_factory=list)

    def payload(self, row: Row, split: Split, bad_rows: BadRows) -> Payload | None:
        """Return a row of the artifact; None for a row that cannot be used, counted once."""
        self.rows += 1
        self.repeated += row.again
        split.read += 1
        try:
            payload, warning = self._checked(row)
        except Unusable as reason:
            if row.again:
                split.read -= 1
            else:
                self.refused += 1
                split.refused += 1
                bad_rows.add(row.place, str(reason))
            return None
        if warning and not row.again:
            self.controlled.append(f"{row.place}: {warning}")
        return payload

    def _checked(self, row: Row) -> tuple[Payload, str]:
        kind, values = self.options.kind, row.values
        if len(self.names) < MOST_COLUMNS_NOTED:
            self.names.update(values)
        columns = self.source.columns.among(values)
        self.fitted = self.fitted or kind.fit(values, columns)
        if row.problem:
            raise Unusable(row.problem)
        payload = kind.read(values, columns)
        warning = self.options.control.check(payload)
        if self.options.answered and "answer" not in payload:
            raise Unusable("no answer, and reward.function=exact_match compares with it")
        return payload, warning

    def require_columns(self) -> None:
        """Raise DataError if no row of the source had the columns that its kind needs."""
        if self.fitted or not self.names:
            return
        wanted, known = self.options.kind.wanted(self.source.columns), sorted(self.names)
        near = {
            role: matches[0]
            for role, name in wanted.items()
            if name not in self.names
            and (matches := difflib.get_close_matches(name, known, n=1, cutoff=0.5))
        }
        names = " or ".join(repr(name) for name in wanted.values())
        raise DataError(
            f"{self.source.name}: no row has the columns it needs ({names}); "
            f"it has {', '.join(map(repr, known))}",
            hint=" ".join(
                f"data.{role}_key={near.get(role, '<column>')}" for role in near or wanted
            ),
        )

    def counts(self) -> dict[str, Any]:
        """Return the counts of the source for `dataset.json`."""
        counts = {n: getattr(self, n) for n in ("rows", "refused", "repeated")}
        return {"name": self.source.name, **counts}


def build_dataset(
    out: Path, *, train: Sequence[Source], held_out: Source | None, options: Options, log: Log
) -> dict[str, Any]:
    """Write the two splits into `out`, and return the contents of `dataset.json`.

    Raises:
        DataError: bad rows, wrong columns, or an empty split.
    """
    if wrong := wrong_probabilities([source.probability for source in train]):
        hint = "probability: 0.7 and 0.3, or none for any source"
        raise DataError(f"data.sources: {wrong}", hint=hint)
    bad_rows = BadRows()
    readings = [Reading(source, options) for source in train]
    apart = [Reading(held_out, options)] if held_out is not None else []
    fraction = 0.0 if apart else options.eval_fraction
    with (
        (out / f"{TRAIN}.jsonl").open("w", encoding="ascii", newline="\n") as train_file,
        (out / f"{HELD_OUT}.jsonl").open("w", encoding="ascii", newline="\n") as heldout_file,
    ):
        trained, heldout = Split(train_file, tested=False), Split(heldout_file, tested=True)
        for reading in apart:
            for row in reading.source.rows():
                if (payload := reading.payload(row, heldout, bad_rows)) is not None:
                    heldout.write(payload, side_id(payload))
        mixed = mix(train, seed=options.seed, stopping=options.stopping)
        for row in itertools.islice(mixed, options.max_samples):
            payload = readings[row.source].payload(row, trained, bad_rows)
            if payload is None:
                continue
            side = side_id(payload)
            if _position(side, options.seed) < fraction:
                trained.read -= 1
                if not row.again:  # a source that is read again adds no second held-out row
                    heldout.read += 1
                    heldout.write(payload, side)
            elif side in heldout.sides:
                trained.overlapping += 1
            else:
                trained.write(payload, side)
    everything = [*readings, *apart]
    for reading in everything:
        reading.require_columns()
    if options.on_bad_line == "fail" and bad_rows.total:
        raise DataError(
            f"{bad_rows.total} of {sum(reading.rows for reading in everything)} rows cannot be "
            f"used, first {bad_rows.shown[0]}",
            details=bad_rows.lines(),
            hint="fix the rows, or leave them out and count them: data.on_bad_line=skip",
        )
    if not apart and not heldout.kept and len(trained.sides) > 1:
        # A source too small for its fraction holds out the row with the lowest position.
        lowest = min(_position(side, options.seed) for side in trained.sides)
        least = replace(options, eval_fraction=math.nextafter(lowest, 1.0))
        return build_dataset(out, train=train, held_out=None, options=least, log=log)
    splits = {TRAIN: trained, HELD_OUT: heldout}
    _refuse_empty(splits, [reading.source.name for reading in everything], bad_rows)
    if bad_rows.total:
        log.warning("%d rows refused, counted and left out:", bad_rows.total)
        for line in bad_rows.lines():
            log.warning("  %s", line)
    if controlled := [place for reading in everything for place in reading.controlled]:
        log.warning(
            "rows with control tokens: %d, first %s; %s", len(controlled), controlled[0], WAYS
        )
    return {
        "format": 1,
        "rows": options.kind.name,
        "splits": {name: split.counts() for name, split in splits.items()},
        "sources": [reading.counts() for reading in readings],
        "refused_examples": bad_rows.lines(),
    }


def _position(side: str, seed: int) -> float:
    """Return a number in [0, 1) for a row: uniform, and the same on every machine."""
    digest = hashlib.sha256(f"{seed} {side}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _refuse_empty(splits: dict[str, Split], sources: Sequence[str], bad_rows: BadRows) -> None:
    """Raise EmptySplitError if a split has no rows."""
    for name, split in splits.items():
        if split.kept:
            continue
        counts = f"{split.read} rows read, {split.refused} refused"
        if split.overlapping:
            counts += f", {split.overlapping} also held out"
        hint = "data.path=<file with rows>"
        if name == HELD_OUT:
            hint = "data.eval_path=<file with rows>, or at least two different conversations"
        raise EmptySplitError(
            f"{', '.join(sources)}: the {name} split is empty: {counts}",
            details=bad_rows.lines(),
            hint=hint,
        )
