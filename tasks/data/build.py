"""Build the `dataset` artifact: `train.jsonl`, `heldout.jsonl`, and counts of all rows.

Rows are written as a stream. Memory holds one id for each kept row, to find duplicates.

The counts in `dataset.json` add up for each split: read = kept + refused + overlapping.
`overlapping` rows are training rows whose exact text is also held out. They are left out, so that
no model is evaluated on a text that it was trained on.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from tasks.core.errors import DataError, EmptySplitError
from tasks.data.columns import wrong_columns
from tasks.data.control import WAYS, Control
from tasks.data.kinds import CONVERSATIONS, Kind, Payload, content_id, side_id
from tasks.data.messages import Unusable
from tasks.data.sources import ALL_EXHAUSTED, MixedRow, Source, mix, wrong_probabilities

Log = logging.Logger | logging.LoggerAdapter[Any]
TRAIN, HELD_OUT = "train", "heldout"
SHOWN = 20
MOST_COLUMNS_NOTED = 50


@dataclass(frozen=True)
class Options:
    """Settings of a dataset.

    Attributes:
        kind: kind of the rows.
        eval_fraction: share of distinct rows to hold out, in (0, 1), if there is no source of
            held-out rows. A hash of the text decides, so exact duplicates stay together.
        seed: seed of the held-out rows, and of the order of mixed sources.
        max_samples: maximum number of rows to read from all training sources together.
        on_bad_line: "fail" raises one error that lists the bad rows, "skip" counts them.
        stopping: end of mixing, "first_exhausted" or "all_exhausted"; see `sources.mix`.
        answered: True if a prompt without an answer is a bad row.
        control: control tokens in the texts of rows.
    """

    kind: Kind = CONVERSATIONS
    eval_fraction: float = 0.05
    seed: int = 0
    max_samples: int | None = None
    on_bad_line: str = "fail"
    stopping: str = ALL_EXHAUSTED
    answered: bool = False
    control: Control = field(default_factory=Control)


class Good(NamedTuple):
    """A usable row: hashes of its contents and of what decides its side, the row, repeated or not.

    The hashes are `kinds.content_id` and `kinds.side_id`; `again`: its source was read before.
    """

    identity: str
    side: str
    payload: Payload
    again: bool


@dataclass
class Split:
    """One output file, and the counts of its rows; `name` is `TRAIN` or `HELD_OUT`."""

    name: str
    file: IO[str]
    read: int = 0
    kept: int = 0
    refused: int = 0
    overlapping: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    sides: set[str] = field(default_factory=set)

    def write(self, good: Good) -> None:
        """Append one row; a repeated row gets a numbered id.

        The file is ASCII, so a Unicode line separator in a text cannot start a new line.
        """
        repeat = self.seen.get(good.identity, 0)
        self.seen[good.identity] = repeat + 1
        self.sides.add(good.side)
        row_id = f"{good.identity}-{repeat}" if repeat else good.identity
        payload = _tested(good.payload) if self.name == HELD_OUT else good.payload
        self.file.write(json.dumps({"id": row_id, **payload}) + "\n")
        self.kept += 1

    def counts(self) -> dict[str, int]:
        """Return the counts. The stage `train` cuts long rows later; it has the tokenizer."""
        return {n: getattr(self, n) for n in ("read", "kept", "refused", "overlapping")}


@dataclass
class Reading:
    """Rows of one source: checked one by one, and counted.

    Attributes:
        source: the source.
        options: settings of the dataset.
        names: names of its columns.
        fitted: True if a row had the columns that its kind needs.
        rows: number of rows read.
        refused: number of rows that cannot be used.
        repeated: number of rows that were read again, in a mixture.
        controlled: places of rows with a control token outside answers.
    """

    source: Source
    options: Options
    names: set[str] = field(default_factory=set)
    fitted: bool = False
    rows: int = 0
    refused: int = 0
    repeated: int = 0
    controlled: list[str] = field(default_factory=list)

    def look(self, mixed: MixedRow) -> Good:
        """Check one row. Raises Unusable with the reason."""
        kind, values = self.options.kind, mixed.row.values
        self.rows += 1
        self.repeated += mixed.again
        if len(self.names) < MOST_COLUMNS_NOTED:
            self.names.update(values)
        columns = self.source.columns.among(values)
        self.fitted = self.fitted or kind.fit(values, columns)
        try:
            if mixed.row.problem:
                raise Unusable(mixed.row.problem)
            payload, warning = self.options.control.apply(kind.read(values, columns))
            if self.options.answered and "answer" not in payload:
                raise Unusable("no answer, and reward.function=exact_match compares with it")
        except Unusable:
            self.refused += not mixed.again
            raise
        if warning and not mixed.again:
            self.controlled.append(f"{mixed.row.place}: {warning}")
        identity, side = content_id(payload), side_id(payload)
        return Good(identity, side, payload, mixed.again)

    def require_columns(self) -> None:
        """Raise DataError if no row of the source had the columns that its kind needs."""
        if self.names and not self.fitted:
            wanted = self.options.kind.wanted(self.source.columns)
            raise wrong_columns(self.names, wanted, self.source.name)

    def counts(self) -> dict[str, Any]:
        """Return the counts of the source for `dataset.json`."""
        counts = {n: getattr(self, n) for n in ("rows", "refused", "repeated")}
        return {"name": self.source.name, **counts}


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
    with ExitStack() as stack:
        splits = {}
        for name in (TRAIN, HELD_OUT):
            file = (out / f"{name}.jsonl").open("w", encoding="ascii", newline="\n")
            splits[name] = Split(name, stack.enter_context(file))
        for reading in apart:
            rows_apart = (MixedRow(0, row, again=False) for row in reading.source.rows())
            for good in _good(rows_apart, apart, splits[HELD_OUT], bad_rows):
                splits[HELD_OUT].write(good)
        rows = itertools.islice(
            mix(train, seed=options.seed, stopping=options.stopping), options.max_samples
        )
        fraction = 0.0 if apart else options.eval_fraction
        goods = _good(rows, readings, splits[TRAIN], bad_rows)
        _divide(goods, splits, lambda side: _position(side, options.seed) < fraction)
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
    if not apart and not splits[HELD_OUT].kept:
        _move_one(out, splits, seed=options.seed)
    _refuse_empty(splits.values(), [reading.source.name for reading in everything], bad_rows)
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


def _good(
    rows: Iterator[MixedRow], readings: Sequence[Reading], split: Split, bad_rows: BadRows
) -> Iterator[Good]:
    """Yield the usable rows, and count the others as refused, each once."""
    for mixed in rows:
        split.read += 1
        try:
            yield readings[mixed.source].look(mixed)
        except Unusable as reason:
            if mixed.again:
                split.read -= 1
                continue
            split.refused += 1
            bad_rows.add(mixed.row.place, str(reason))


def _divide(
    goods: Iterator[Good], splits: dict[str, Split], is_held_out: Callable[[str], bool]
) -> None:
    """Write each usable row of the training sources to its split."""
    train, heldout = splits[TRAIN], splits[HELD_OUT]
    for good in goods:
        if is_held_out(good.side):
            train.read -= 1
            if not good.again:  # a source that is read again adds no second held-out row
                heldout.read += 1
                heldout.write(good)
        elif good.side in heldout.sides:
            train.overlapping += 1
        else:
            train.write(good)


def _tested(payload: Payload) -> Payload:
    """Return a held-out row; a pair gets `messages`, so that the served model can be evaluated."""
    if "chosen" not in payload:
        return payload
    return {"messages": [*payload["prompt"], *payload["chosen"]], **payload}


def _position(identity: str, seed: int) -> float:
    """Return a number in [0, 1) for a row: uniform, and the same on every machine."""
    digest = hashlib.sha256(f"{seed} {identity}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _move_one(out: Path, splits: dict[str, Split], *, seed: int) -> None:
    """Hold out the row with the lowest position, if a small source left no held-out row."""
    train, heldout = splits[TRAIN], splits[HELD_OUT]
    if len(train.sides) < 2:
        return
    nearest = min(train.sides, key=lambda side: _position(side, seed))
    path = out / f"{TRAIN}.jsonl"
    stay, moved = [], []
    for line in path.read_text(encoding="ascii").splitlines(keepends=True):
        payload = json.loads(line)
        identity = payload.pop("id")
        if side_id(payload) != nearest:
            stay.append(line)
        else:
            moved.append(json.dumps({"id": identity, **_tested(payload)}) + "\n")
    path.write_text("".join(stay), encoding="ascii", newline="\n")
    held_path = out / f"{HELD_OUT}.jsonl"
    held_path.write_text("".join(moved), encoding="ascii", newline="\n")
    for split, change in ((train, -len(moved)), (heldout, len(moved))):
        split.read += change
        split.kept += change


def _refuse_empty(splits: Iterable[Split], sources: Sequence[str], bad_rows: BadRows) -> None:
    """Raise EmptySplitError if a split has no rows."""
    for split in splits:
        if split.kept:
            continue
        counts = f"{split.read} rows read, {split.refused} refused"
        if split.overlapping:
            counts += f", {split.overlapping} also held out"
        hint = "data.path=<file with rows>"
        if split.name == HELD_OUT:
            hint = "data.eval_path=<file with rows>, or at least two different conversations"
        raise EmptySplitError(
            f"{', '.join(sources)}: the {split.name} split is empty: {counts}",
            details=bad_rows.lines(),
            hint=hint,
        )
