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
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from tasks.config.sections import ControlTokens
from tasks.core.errors import DataError, EmptySplitError
from tasks.data.kinds import CONVERSATIONS, Kind, Payload, content_id, side_id, unread
from tasks.data.messages import REASONING, SYSTEM, Unusable
from tasks.data.readers import ALL_EXHAUSTED, Row, Source, mix, wrong_probabilities
from tasks.process.output import Log

REFUSE, KEEP = "refuse", "keep"
_PARTS = ("prompt", "messages", "chosen", "rejected")
WAYS = f"data.control_tokens={KEEP} takes it as it is"
TRAIN, HELD_OUT = "train", "heldout"
COUNTS = ("read", "kept", "refused", "overlapping")  # `train` cuts long rows: it has the tokenizer
SHOWN = 20
"""Bad rows that an error or the log names."""
MOST_COLUMNS_NOTED = 50


@dataclass(frozen=True)
class Control:
    """Control tokens of a tokenizer, and what becomes of a text that contains one.

    A text such as `<|im_end|>` in a message becomes the token that ends a turn. In a question it
    forges turns, and an answer with it is learned to end there. Raw texts are taken as they are,
    since control tokens separate their documents.
    """

    tokens: tuple[str, ...] = ()  # their texts; none if the tokenizer is not known
    # `data.control_tokens`; None refuses them in answers and warns elsewhere
    mode: ControlTokens | None = None
    last_answer: bool = False  # True if only the last answer of a conversation bears loss

    def check(self, row: Mapping[str, Any]) -> str:
        """Return a warning about the first control token outside answers, or "".

        Raises Unusable for a control token in an answer, or anywhere with `refuse`.
        """
        warning = ""
        if not self.tokens or self.mode == KEEP:
            return warning
        for part in (name for name in _PARTS if name in row):
            messages = row[part]
            if "columns" in row and messages[-1]["role"] == "assistant":
                messages = messages[:-1]  # the reference answer of a prompt is not rendered
            for number, message in enumerate(messages):
                texts = (message.get(key, "") for key in ("content", *REASONING))
                match = next(filter(None, map(self._pattern.search, texts)), None)
                if match is None:
                    continue
                answer = self._is_answer(row, part, number)
                who = "an answer" if answer else f"by the {message['role']}"
                problem = f"message {number + 1} of {part!r}, {who}, holds {match[0]!r}"
                if answer or self.mode == REFUSE:
                    raise Unusable(f"{problem}, a control token: {WAYS}")
                warning = warning or problem
        return warning

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.tokens, key=len, reverse=True)
        return re.compile("|".join(re.escape(token) for token in longest_first))

    def _is_answer(self, row: Mapping[str, Any], part: str, number: int) -> bool:
        """Return True if a message bears loss."""
        if row[part][number]["role"] != "assistant" or part == "prompt" or "columns" in row:
            return False
        only_last = part == "messages" and (self.last_answer or "desirable" in row)
        return not only_last or number == len(row[part]) - 1


@dataclass(frozen=True)
class Options:
    """Settings of a dataset."""

    kind: Kind = CONVERSATIONS
    # share of distinct rows to hold out, in (0, 1), if there is no source of held-out rows. A hash
    # of the text decides, so exact duplicates stay together
    eval_fraction: float = 0.05
    seed: int = 0  # of the held-out rows, and of the order of mixed sources
    max_samples: int | None = None  # rows to read from all training sources together, at most
    on_bad_line: str = "fail"  # "fail" raises one error that lists the bad rows, "skip" counts them
    stopping: str = ALL_EXHAUSTED  # end of mixing; see `readers.mix`
    answered: bool = False  # True if a prompt without an answer is a bad row
    control: Control = field(default_factory=Control)  # control tokens in the texts of rows
    ignored: Sequence[str] = ()  # columns that may be left out although they carry meaning


@dataclass
class Split:
    """One output file, and the counts of its rows."""

    file: IO[str]
    counts: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    sides: set[str] = field(default_factory=set)

    def write(self, payload: Payload, side: str) -> None:
        """Append one row; a repeated row gets a numbered id.

        The file is ASCII, so a Unicode line separator in a text cannot start a new line.
        """
        own = {k: v for k, v in payload.items() if k != "messages" or "chosen" not in payload}
        identity = content_id(own)
        repeat = self.seen[identity]
        self.seen[identity] += 1
        self.sides.add(side)
        row_id = f"{identity}-{repeat}" if repeat else identity
        self.file.write(json.dumps({"id": row_id, **payload}) + "\n")
        self.counts["kept"] += 1


@dataclass
class Reading:
    """Rows of one source: checked one by one, and counted."""

    source: Source
    options: Options
    names: set[str] = field(default_factory=set)  # names of its columns
    fitted: bool = False  # True if a row had the columns that its kind needs
    counts: Counter[str] = field(default_factory=Counter)  # rows, refused, repeated
    bad: list[str] = field(default_factory=list)  # places and problems of the first bad rows
    unread: set[str] = field(default_factory=set)  # columns with meaning that training leaves out
    # places of rows with a control token outside answers
    controlled: list[str] = field(default_factory=list)

    def payload(self, row: Row, split: Split) -> Payload | None:
        """Return a row of the artifact; None for a row that cannot be used, counted once."""
        self.counts.update(rows=1, repeated=int(row.again))
        split.counts["read"] += 1
        try:
            payload, warning = self._checked(row)
        except Unusable as reason:
            if row.again:
                split.counts["read"] -= 1
            else:
                self.counts["refused"] += 1
                split.counts["refused"] += 1
                if len(self.bad) < SHOWN:
                    self.bad.append(f"{row.place}: {reason}")
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
        payload = kind.read(values, columns, self.options.ignored)
        self.unread.update(unread(values, columns, payload) - {*self.options.ignored})
        warning = self.options.control.check(payload)
        if self.options.answered and "answer" not in payload:
            raise Unusable("no answer, and reward.function=exact_match compares with it")
        return payload, warning

    def require_columns(self) -> None:
        """Raise DataError for columns with meaning that are not read, and for missing columns."""
        if self.unread:
            columns = sorted(self.unread)
            systems = [f"data.system_key={name}" for name in columns if name in SYSTEM]
            way = systems[0] if systems else "write it into the row's messages"
            raise DataError(
                f"{self.source.name}: training would leave out {', '.join(map(repr, columns))}",
                hint=f"{way}, or data.ignored_columns=[{','.join(columns)}]",
            )
        system = self.source.columns.system
        if system and self.names and system not in self.names:
            close = [*difflib.get_close_matches(system, self.names, n=1, cutoff=0.5), "<column>"]
            name = self.source.name
            raise DataError(f"{name}: no row has {system!r}", hint=f"data.system_key={close[0]}")
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


def build_dataset(
    out: Path, *, train: Sequence[Source], held_out: Source | None, options: Options, log: Log
) -> dict[str, Any]:
    """Write the two splits into `out`, and return the contents of `dataset.json`.

    Raises DataError for bad rows, wrong columns, or an empty split.
    """
    if wrong := wrong_probabilities([source.probability for source in train]):
        hint = "probability: 0.7 and 0.3, or none for any source"
        raise DataError(f"data.sources: {wrong}", hint=hint)
    readings = [Reading(source, options) for source in train]
    apart = [Reading(held_out, options)] if held_out is not None else []
    fraction = 0.0 if apart else options.eval_fraction
    with (
        (out / f"{TRAIN}.jsonl").open("w", encoding="ascii", newline="\n") as train_file,
        (out / f"{HELD_OUT}.jsonl").open("w", encoding="ascii", newline="\n") as heldout_file,
    ):
        trained, heldout = Split(train_file), Split(heldout_file)
        for reading in apart:
            for row in reading.source.rows():
                if (payload := reading.payload(row, heldout)) is not None:
                    heldout.write(tested(payload), side_id(payload))
        mixed = mix(train, seed=options.seed, stopping=options.stopping)
        for row in itertools.islice(mixed, options.max_samples):
            payload = readings[row.source].payload(row, trained)
            if payload is None:
                continue
            side = side_id(payload)
            if _position(side, options.seed) < fraction:
                trained.counts["read"] -= 1
                if not row.again:  # a source that is read again adds no second held-out row
                    heldout.counts["read"] += 1
                    heldout.write(tested(payload), side)
            elif side in heldout.sides:
                trained.counts["overlapping"] += 1
            else:
                trained.write(payload, side)
    everything = [*readings, *apart]
    for reading in everything:
        reading.require_columns()
    total, refused = (sum(r.counts[name] for r in everything) for name in ("rows", "refused"))
    bad = [line for reading in (*apart, *readings) for line in reading.bad][:SHOWN]
    bad += [f"... and {refused - SHOWN} more"] if refused > SHOWN else []
    if options.on_bad_line == "fail" and bad:
        read = sum(reading.counts["rows"] for reading in readings)
        part = "the first " if read == options.max_samples else ""
        raise DataError(
            f"{refused} of {part}{total} rows cannot be used, first {bad[0]}",
            details=bad,
            hint="fix the rows, or leave them out and count them: data.on_bad_line=skip",
        )
    if not apart and not heldout.counts["kept"] and len(trained.sides) > 1:
        # A source too small for its fraction holds out the row with the lowest position.
        lowest = min(_position(side, options.seed) for side in trained.sides)
        least = replace(options, eval_fraction=math.nextafter(lowest, 1.0))
        return build_dataset(out, train=train, held_out=None, options=least, log=log)
    splits = {TRAIN: trained, HELD_OUT: heldout}
    for name, split in splits.items():
        if not split.counts["kept"]:
            names = ", ".join(reading.source.name for reading in everything)
            counts = f"{split.counts['read']} rows read, {split.counts['refused']} refused"
            if split.counts["overlapping"]:
                counts += f", {split.counts['overlapping']} also held out"
            hint = "data.path=<file with rows>"
            if name == HELD_OUT:
                hint = "data.eval_path=<file with rows>, or at least two different conversations"
            problem = f"{names}: the {name} split is empty: {counts}"
            raise EmptySplitError(problem, details=bad, hint=hint)
    if bad:
        log.warning("%d rows refused, counted and left out:", refused)
        for line in bad:
            log.warning("  %s", line)
    if controlled := [place for reading in everything for place in reading.controlled]:
        log.warning(
            "rows with control tokens: %d, first %s; %s", len(controlled), controlled[0], WAYS
        )
    return account(
        options.kind.name,
        {name: split.counts for name, split in splits.items()},
        [
            {"name": r.source.name, **{n: r.counts[n] for n in ("rows", "refused", "repeated")}}
            for r in readings
        ],
        bad,
    )


def account(
    rows: str,
    splits: Mapping[str, Mapping[str, int]],
    sources: Sequence[Mapping[str, Any]] = (),
    refused: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the contents of `dataset.json`; `splits` has the counts of rows by split."""
    return {
        "format": 1,
        "rows": rows,
        "splits": {
            split: {n: counts.get(n, 0) for n in COUNTS} for split, counts in splits.items()
        },
        "sources": list(sources),
        "refused_examples": list(refused),
    }


def tested(payload: Payload) -> Payload:
    """Return a held-out row; a pair gets `messages`, so that the served model can be evaluated."""
    if "chosen" not in payload:
        return payload
    return {"messages": [*payload["prompt"], *payload["chosen"]], **payload}


def _position(side: str, seed: int) -> float:
    """Return a number in [0, 1) for a row: uniform, and the same on every machine."""
    digest = hashlib.sha256(f"{seed} {side}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48
