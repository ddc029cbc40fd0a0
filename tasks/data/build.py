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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.core.errors import DataError
from tasks.data.control import WAYS, Control
from tasks.data.kinds import CONVERSATIONS, Kind, side_id
from tasks.data.messages import Unusable
from tasks.data.reading import Good, Reading, Split
from tasks.data.sources import ALL_EXHAUSTED, MixedRow, Source, mix, wrong_probabilities

Log = logging.Logger | logging.LoggerAdapter[Any]
TRAIN, HELD_OUT = "train", "heldout"
SHOWN = 20


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

    def raise_if_any(self, *, read: int) -> None:
        """Raise one `DataError` that lists the bad rows among `read` rows."""
        if not self.total:
            return
        raise DataError(
            f"{self.total} of {read} rows cannot be used, first {self.shown[0]}",
            details=self.lines(),
            hint="fix the rows, or leave them out and count them: data.on_bad_line=skip",
        )


def build_dataset(
    out: Path, *, train: Sequence[Source], held_out: Source | None, options: Options, log: Log
) -> dict[str, Any]:
    """Write the two splits into `out`, and return the contents of `dataset.json`.

    Args:
        out: existing directory.
        train: sources of training rows, at least one.
        held_out: source of held-out rows; None holds out `eval_fraction` of the training rows.
        options: settings of the dataset.
        log: gets skipped rows and unused columns.

    Raises:
        DataError: bad rows, wrong columns, or an empty split.
    """
    _check_options(options, train)
    bad_rows = BadRows()
    how = (options.kind, options.answered, options.control)
    readings = [Reading(source, *how) for source in train]
    apart = Reading(held_out, *how) if held_out is not None else None
    with ExitStack() as stack:
        splits = {
            name: Split(
                stack.enter_context(
                    (out / f"{name}.jsonl").open("w", encoding="ascii", newline="\n")
                )
            )
            for name in (TRAIN, HELD_OUT)
        }
        if apart is not None:
            rows_apart = (MixedRow(0, row, again=False) for row in apart.source.rows())
            for good in _good(rows_apart, [apart], splits[HELD_OUT], bad_rows):
                splits[HELD_OUT].write(_tested(good))
        rows = itertools.islice(
            mix(train, seed=options.seed, stopping=options.stopping), options.max_samples
        )
        fraction = 0.0 if apart is not None else options.eval_fraction
        goods = _good(rows, readings, splits[TRAIN], bad_rows)
        _divide(goods, splits, lambda side: _position(side, options.seed) < fraction)
    everything = [*readings, *([apart] if apart is not None else [])]
    for reading in everything:
        reading.require_columns()
    if options.on_bad_line == "fail":
        bad_rows.raise_if_any(read=sum(reading.rows for reading in everything))
    if apart is None and not splits[HELD_OUT].kept:
        _move_one(out, splits, seed=options.seed)
    names = ", ".join(source.name for source in train)
    _refuse_empty(splits, (names, held_out.name if held_out is not None else names), bad_rows)
    unused = sorted(set.intersection(*(reading.unused() for reading in everything)))
    _log_counts(bad_rows, unused, log)
    controlled = [reading for reading in everything if reading.controlled]
    if controlled:
        count, first = sum(r.controlled for r in controlled), controlled[0].first_controlled
        log.warning("rows with control tokens: %d, first %s; %s", count, first, WAYS)
    return {
        "format": 1,
        "rows": options.kind.name,
        "splits": {name: split.counts() for name, split in splits.items()},
        "sources": [reading.counts() for reading in readings],
        "refused_examples": bad_rows.lines(),
        "unused_columns": unused,
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
                heldout.write(_tested(good))
        elif good.side in heldout.sides:
            train.overlapping += 1
        else:
            train.write(good)


def _tested(good: Good) -> Good:
    """Return a held-out row; a pair gets `messages`, so that the served model can be evaluated."""
    payload = good.payload
    if "chosen" not in payload:
        return good
    return good._replace(payload={"messages": [*payload["prompt"], *payload["chosen"]], **payload})


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
        good = Good(identity, side_id(payload), payload, again=False)
        if good.side != nearest:
            stay.append(line)
        else:
            moved.append(json.dumps({"id": identity, **_tested(good).payload}) + "\n")
    path.write_text("".join(stay), encoding="ascii", newline="\n")
    held_path = out / f"{HELD_OUT}.jsonl"
    held_path.write_text("".join(moved), encoding="ascii", newline="\n")
    for split, change in ((train, -len(moved)), (heldout, len(moved))):
        split.read += change
        split.kept += change


def _check_options(options: Options, train: Sequence[Source]) -> None:
    if not 0.0 < options.eval_fraction < 1.0:
        raise DataError(
            f"data.eval_fraction={options.eval_fraction} is not between 0 and 1",
            hint="data.eval_fraction=0.05, or data.eval_path=<file>",
        )
    if options.max_samples is not None and options.max_samples < 1:
        raise DataError(
            f"data.max_samples={options.max_samples} keeps nothing", hint="data.max_samples=null"
        )
    if options.on_bad_line not in ("fail", "skip"):
        raise DataError(
            f"data.on_bad_line={options.on_bad_line} is not known",
            hint="data.on_bad_line=fail or skip",
        )
    wrong = wrong_probabilities([source.probability for source in train])
    if wrong:
        raise DataError(
            f"data.sources: {wrong}", hint="probability: 0.7 and 0.3, or none for any source"
        )


def _refuse_empty(splits: dict[str, Split], sources: tuple[str, str], bad_rows: BadRows) -> None:
    """Raise DataError if a split has no rows."""
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
            f"{source}: the {name} split is empty: {counts}", details=bad_rows.lines(), hint=hint
        )


def _log_counts(bad_rows: BadRows, unused: list[str], log: Log) -> None:
    if bad_rows.total:
        log.warning("%d rows refused, counted and left out:", bad_rows.total)
        for line in bad_rows.lines():
            log.warning("  %s", line)
    if unused:
        log.info("columns that are not used: %s", ", ".join(unused))
